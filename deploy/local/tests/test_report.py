"""Rows in, table, promises and pictures out."""

import io
import json
import math

import matplotlib.image
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from keptset.compare import comparison_table, final_numbers
from keptset.display import Display
from keptset.metrics import MetricsTail
from keptset.plots import BLUE, Curve, _log_scale, draw_comparison, draw_run, spread
from keptset.run import is_exact
from keptset.summary import number, promises, reward_promise, summarise, table
from keptset_settings import RunSettings


def row(step, **changes):
    return {
        "step": step,
        "reward/mean": 0.2 + 0.02 * step,
        "mismatch_kl/mean": 1e-9,
        "mismatch_kl/max": 2e-8,
        "ratio/max_abs_log": 1e-5,
        "kept/coverage": 1.0,
        "kept/size_mean": 9.5,
        "kept/size_p50": 2.0,
        "kept/size_p99": 95.0,
        "kept/singleton_share": 0.5,
        "rejected/sequences": 0.0,
        "rollout/error_rate": 0.0,
        "seconds/rollout": 1.0,
        "seconds/train": 0.5,
        "seconds/weights": 0.25,
    } | {name.replace("__", "/"): value for name, value in changes.items()}


ROWS = [row(step) for step in range(1, 31)]


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def test_the_summary_adds_up():
    got = summarise(ROWS, {"inference": 20.0, "trainer": 6.0}, 80.0)
    assert got["reward/first"] == pytest.approx(0.22)
    assert got["reward/last"] == pytest.approx(0.8)
    assert got["reward/last_five"] == pytest.approx(0.76)
    assert got["seconds/rollout"] == pytest.approx(30)
    assert got["seconds/startup"] == 20
    assert got["kept/size_p99"] == 95


def test_the_table_shows_what_a_reader_looks_for():
    text = shown(
        table(summarise(ROWS, {"inference": 20.0}, 80.0), promises(ROWS, truncating=True, exact=True))
    )
    for expected in (
        "0.22 at the first",
        "0.8 at the last",
        "mean 1.0e-09",
        "p99 95",
        "50.0 %",
        "startup 20.0 s",
    ):
        assert expected in text
    assert text.count("✓") == 4
    assert "✗" not in text


def test_coverage_is_said_in_words():
    assert "every token trained on has its set" in shown(table(summarise(ROWS, {}, 1.0), []))
    rows = [*ROWS[:6], ROWS[6] | {"kept/coverage": 0.995}, *ROWS[7:]]
    text = shown(table(summarise(rows, {}, 1.0), []))
    assert "99.5 % of the tokens trained on have their set, on the worst step" in text


def test_a_run_without_masks_has_a_table_too():
    rows = [{k: v for k, v in r.items() if not k.startswith("kept/")} for r in ROWS]
    text = shown(table(summarise(rows, {}, 1.0), promises(rows, truncating=False, exact=True)))
    assert "kept set" not in text
    assert text.count("✓") == 3


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mismatch_kl/mean", 1.01e-7, "mismatch KL"),
        ("mismatch_kl/mean", math.nan, "mismatch KL"),
        ("ratio/max_abs_log", 1e-4, "log ratio"),
        ("kept/coverage", 1 - 1e-12, "coverage"),
        ("rollout/error_rate", 0.01, "rollout errors"),
    ],
)
def test_a_single_bad_step_breaks_a_promise_and_is_named(name, value, text):
    rows = [*ROWS[:6], ROWS[6] | {name: value}, *ROWS[7:]]
    broken = [p for p in promises(rows, truncating=True, exact=True) if not p.held]
    assert len(broken) == 1
    assert text in broken[0].text
    assert "step 7" in broken[0].worst


def test_above_level_0_the_promise_is_of_the_tokens_on_policy():
    """The others have the policy's change in their ratios."""
    name = "on_policy/ratio_max_abs_log"
    stale = [row | {"ratio/max_abs_log": 0.2, "staleness/mean": 1.0} for row in ROWS]

    def found(rows):
        kept = promises(rows, truncating=True, exact=True, max_async_level=1)
        return [promise for promise in kept if "on-policy" in promise.text]

    (held,) = found([*stale[:5], *(row | {name: 1e-5, "on_policy/share": 0.5} for row in stale[5:])])
    assert held.held
    (broken,) = found([*stale[:6], stale[6] | {name: 0.01}, *stale[7:]])
    assert not broken.held
    assert "step 7" in broken.worst
    assert found(stale) == [], "no step had one"


def test_promises_about_missing_metrics_are_broken():
    rows = [*ROWS[:3], {"step": 4}]
    assert not any(p.held for p in promises(rows, truncating=True, exact=True))
    assert not any(p.held for p in promises([], truncating=True, exact=True))


@pytest.mark.parametrize(
    ("trainer", "dtype", "exact"),
    [
        ({}, "float32", True),
        ({"dtype": "float32"}, "float32", True),
        ({"dtype": "bfloat16"}, "float32", False),
        ({}, "bfloat16", False),
        ({"unsafe_ignore_kept_tokens": True}, "float32", False),
    ],
)
def test_noise_of_float32_is_promised_only_where_both_compute_in_it(trainer, dtype, exact):
    """Else a sound run would end with "do not trust this run"."""
    run = RunSettings.model_validate({"inference": {"vllm": {"dtype": dtype}}, "trainer": trainer})
    assert is_exact(run) is exact


def test_numbers_are_readable():
    assert [number(v) for v in (None, 0, 1.0, 0.8312345, 1.234e-9, 12345.6)] == [
        "-",
        "0",
        "1",
        "0.8312",
        "1.2e-09",
        "12,346",
    ]


def test_the_tail_waits_for_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new_rows() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.new_rows() == [{"step": 1}]
    assert tail.new_rows() == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.new_rows() == [{"step": 2}]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [], [row(1, mismatch_kl__mean=0.0), row(2)], [{"step": 1}]])
def test_a_picture_is_drawn_of_any_rows(tmp_path, rows):
    draw_run(rows, "title", tmp_path / "reward.png")
    assert matplotlib.image.imread(tmp_path / "reward.png").shape[1] > 1000


def test_evaluations_and_entropy_are_in_the_picture(tmp_path):
    plain = [row(step) for step in (1, 2, 3, 4)]
    more = [{**row, "entropy/full": 1.5, "eval/words/avg@4": 0.5} for row in plain]
    shapes = []
    for name, rows in (("plain", plain), ("more", more)):
        draw_run(rows, "title", tmp_path / f"{name}.png")
        shapes.append(matplotlib.image.imread(tmp_path / f"{name}.png").shape)
    assert shapes[0][0] == shapes[1][0], "as high"
    assert shapes[0][1] < shapes[1][1], "and a panel wider"


def test_exact_zeros_have_a_place_on_the_log_scale(tmp_path):
    zero = [row(step, mismatch_kl__mean=0.0) for step in (1, 2, 3)]
    noisy = [row(step, mismatch_kl__mean=4e-4) for step in (1, 2, 3)]
    draw_comparison(
        [Curve("a", zero, "#6e7781"), Curve("b", noisy, BLUE)], "title", tmp_path / "deep" / "c.png"
    )
    picture = matplotlib.image.imread(tmp_path / "deep" / "c.png")[..., :3]
    blue = [int(BLUE[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (abs(picture - blue).max(axis=-1) < 0.02).sum() > 500


@pytest.mark.parametrize(("worst", "scale"), [(1e-9, "log"), (0.0, "symlog"), (1e-20, "symlog")])
def test_there_is_a_0_on_the_log_scale_only_if_it_is_needed(worst, scale):
    axes = Figure().subplots()
    _log_scale(axes, [Curve("", [row(1, mismatch_kl__mean=worst), row(2)], BLUE)], "mismatch_kl/mean")
    assert axes.get_yscale() == scale
    assert ("0" in [label.get_text() for label in axes.get_yticklabels()]) == (scale == "symlog")


def test_labels_keep_their_distance():
    assert spread([0.5, 0.51], [0.2, 0.2]) == pytest.approx([0.405, 0.605])
    assert spread([0.2, 0.8], [0.2, 0.2]) == [0.2, 0.8]
    assert spread([0.0, 0.0, 0.0], [0.2, 0.1, 0.2]) == pytest.approx([0.1, 0.25, 0.4])
    assert spread([1.0, 1.0, 1.0], [0.2, 0.1, 0.2]) == pytest.approx([0.6, 0.75, 0.9])
    assert spread([], []) == []


def test_the_comparison_has_the_numbers_that_matter():
    stuck = [
        row(step, **{"reward/mean": 0.21, "rejected/sequences": 1.0, "mismatch_kl/mean": 4e-4})
        for step in range(1, 31)
    ]
    finals = {"replayed": final_numbers(ROWS), "not replayed": final_numbers(stuck)}
    assert finals["not replayed"]["rejected_sequences_last_5"] == 1.0
    assert finals["replayed"]["reward_last_5"] == pytest.approx(0.76)
    json.dumps(finals, allow_nan=False)
    text = shown(comparison_table(finals))
    assert "100.0 %" in text
    assert "4.0e-04" in text


def test_a_file_gets_plain_lines():
    console = Console(file=io.StringIO(), width=80)
    display = Display(console)
    with display.waiting() as waiting:
        waiting.update("waiting for inference", 1.0)
        waiting.update("waiting for inference", 11.0)
        waiting.update("waiting for inference", 12.0)
    with display.training(30) as training:
        training.row(ROWS[0])
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["waiting", "for", "inference,", "11", "s"],
        ["step", "1/30", "reward", "0.22", "mismatch", "KL", "1.0e-09", "coverage", "1"],
    ]


def test_a_terminal_gets_a_bar():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console).training(30) as training:
        training.row(ROWS[4])
    text = console.file.getvalue()
    assert "5/30" in text
    assert "reward 0.3" in text


@pytest.mark.parametrize(
    ("rewards", "held"), [([0.1] + [0.8] * 5, True), ([0.9] * 5 + [0.7] * 5, False), ([], False)]
)
def test_expected_reward_is_that_of_the_last_five_steps(rewards, held):
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, start=1)]
    assert reward_promise(rows, 0.75).held is held
