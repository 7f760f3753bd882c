"""`keptset check`: what it says of a configuration, its exit code, and the configs that it writes."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from keptset.__main__ import main
from keptset_settings import load_service

DEMO = Path(__file__).parents[1] / "reverse-text.toml"
RUNS = sorted(path for path in DEMO.parent.glob("*.toml") if path.name != "pyproject.toml")

MIXED = """
inference.model = "m"
orchestrator.inference_urls = ["http://a:8100", "http://b:8200"]
[orchestrator.train.sampling]
top_p = 0.9
[[orchestrator.train.source]]
name = "math"
[[orchestrator.train.source]]
name = "books"
group_size = 2
generator = {kind = "frozen", url = "https://h/v1", model = "teacher"}
sampling = {top_p = 0.8}
[[orchestrator.train.source]]
name = "plain"
sampling = {top_p = 1.0}
algorithm = {kind = "opsd"}
[[orchestrator.train.source]]
name = "narrow"
sampling = {top_k = 40}
[[orchestrator.eval.source]]
name = "held-out"
sampling = {top_p = 0.5}
"""

Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks a configuration; returns exit code and what was printed, white space as one space."""

    def call(text: str, *arguments: object) -> tuple[int, str]:
        path = tmp_path / "run.toml"
        path.write_text(text)
        code = main(["check", str(path), *map(str, arguments)])
        printed = capsys.readouterr()
        assert printed.err == ""
        return code, " ".join(printed.out.split())

    return call


@pytest.mark.parametrize(
    "said",
    [
        "train source math generator the policy environment reverse-text samples temperature 1, top_p 0.9",
        "truncates yes (top_p): every token trained on needs its kept set bound 512 ids a token: no top_k "
        "is set, "
        "and capture holds 512",
        "filters none: gibberish and repetition, whose thresholds are for the whole vocabulary, left the "
        "default",
        "share 2 of 8 prompts a step, 16 rollouts each",
        "train source books generator frozen: teacher at https://h/v1 environment reverse-text samples top_p "
        "0.8; the rest is up to it truncates",
        "truncates as it likes (top_p): nothing of it is replayed bound none: it is exempt algorithm sft",
        "share 2 of 8 prompts a step, 2 rollouts each",
        "train source plain generator the policy environment reverse-text samples temperature 1, no "
        "truncation "
        "truncates no: logprobs are over the whole vocabulary, no kept sets are needed bound none is needed "
        "algorithm opsd; compared with the rollout's logprobs, which nothing cuts filters gibberish (only "
        "counted)",
        "truncates yes (top_p, top_k): every token trained on needs its kept set bound 40 ids a token: "
        "top_k of narrow",
        "eval source held-out environment reverse-text samples temperature 1, top_p 0.5 truncates yes "
        "(top_p), "
        "without kept sets: nothing of it is trained on gives avg@1 and pass@k of 32 prompts every 10 steps",
        "capture on in inference-0.toml to inference-1.toml (auto): math, narrow truncate",
        "noted [orchestrator.train.source[0].sampling] top_k: sets no bound, but top_p truncates",
        "refused nothing",
    ],
)
def test_what_each_source_comes_to(check: Check, said: str):
    code, printed = check(MIXED)
    assert code == 0
    assert said in printed


def test_refusal_is_told_beside_everything_else_with_the_way_out(check: Check):
    code, printed = check(MIXED, "--orchestrator.train.algorithm.kind", "opsd")
    assert code == 1
    assert "train source math" in printed
    assert "algorithm opsd; refused: the rollout's logprobs are over the kept sets" in printed
    assert 'refused [orchestrator.train.algorithm] kind = "opsd": compares logprobs over the whole' in printed
    assert "set trainer.full_vocabulary_scores = true, or sample without truncation" in printed
    assert "(from --orchestrator.train.algorithm.kind)" in printed
    assert "refused nothing" not in printed


def test_what_is_refused_is_marked_where_the_source_is_told(check: Check):
    """An algorithm that cannot be, a filter whose threshold means nothing: not as if they were taken."""
    code, printed = check(
        """
        inference.model = "m"
        [[orchestrator.train.source]]
        name = "books"
        generator = {kind = "frozen", url = "https://h/v1", model = "teacher"}
        algorithm = {kind = "grpo"}
        [[orchestrator.train.source]]
        name = "sums"
        algorithm = {kind = "sft"}
        sampling = {top_p = 0.9}
        filter = [{kind = "gibberish"}, {kind = "zero_advantage"}]
        """
    )
    assert code == 1
    assert "algorithm grpo; refused: the rollouts are another model's" in printed
    assert "algorithm sft; refused: the rollouts are the policy's own" in printed
    assert "filters gibberish (refused: its threshold is for the whole vocabulary), zero_advantage" in printed
    assert "samples as it likes truncates as it likes" in printed


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("algorithm = {kind = 'opd'}", "algorithm opd; refused: no reference is named"),
        (
            "algorithm = {kind = 'opsd'}\nsampling = {temperature = 0.6}",
            "algorithm opsd; refused: the reference is scored at temperature 1",
        ),
        ("group_size = 1", "algorithm grpo; refused: a group of one has nobody to compare with"),
    ],
)
def test_algorithm_that_cannot_compare_is_marked(check: Check, train: str, said: str):
    code, printed = check(f"inference.model = 'm'\n[orchestrator.train]\n{train}\n")
    assert code == 1
    assert said in printed


def test_masks_alone_are_told_as_what_is_sampled(check: Check):
    evaluated = "[[orchestrator.eval.source]]\nsampling = {extra_body = {min_tokens = 3, stop = 'x'}}\n"
    printed = check("inference.model = 'm'\n" + evaluated)[1]
    assert "samples temperature 1, min_tokens truncates yes (min_tokens), without kept sets" in printed


def test_way_out_is_one(check: Check):
    code, printed = check(
        MIXED, "--orchestrator.train.algorithm.kind", "opsd", "--trainer.full_vocabulary_scores", "true"
    )
    assert code == 0
    assert "algorithm opsd; compared over the whole vocabulary by the trainer" in printed
    assert "scores over the whole vocabulary, given with each step" in printed


def test_settings_that_cannot_be_read_are_refused(check: Check):
    assert check("inference.modl = 'm'\n")[0] == 1
    code, printed = check("[inference\n")
    assert (code, "not TOML" in printed) == (1, True)
    assert check("inference.model = 'm'\n", "--orchestrator.steps", "many")[0] == 1


def test_bound_that_nobody_set_is_said_to_be_chosen_here(check: Check):
    for off in ("", "orchestrator.train.sampling.top_k = -1\n", "orchestrator.train.sampling.top_k = 0\n"):
        printed = check(f"inference.model = 'm'\norchestrator.train.sampling.min_p = 0.1\n{off}")[1]
        assert "bound 512 ids a token: no top_k is set, and capture holds 512" in printed


def test_share_is_the_one_that_a_step_has(check: Check):
    two = "[[orchestrator.train.source]]\nname = 'a'\n[[orchestrator.train.source]]\nname = 'b'\nratio = {}\n"
    code, printed = check("inference.model = 'm'\n" + two.format(2))
    assert code == 0
    assert "share 2 or 3 of 8 prompts a step, 2.67 on average, 16 rollouts each" in printed
    assert "share 5 or 6 of 8 prompts a step, 5.33 on average, 16 rollouts each" in printed
    code, printed = check("inference.model = 'm'\n" + two.format(0.01))
    assert code == 0
    assert "share 0 or 1 of 8 prompts a step, 0.0792 on average, 16 rollouts each" in printed
    code, printed = check("inference.model = 'm'\n" + two.format(0.001))
    assert code == 1
    assert (
        "[orchestrator.train.source[1]] ratio = 0.001: its share of the run's 240 prompts is less" in printed
    )


def test_capture_switched_off_by_hand_is_refused(check: Check):
    code, printed = check(MIXED, "--inference.enable_return_sampling_mask", "false")
    assert code == 1
    assert (
        "refused [inference] enable_return_sampling_mask = false: but math, narrow truncate, and" in printed
    )


def test_no_truncation_needs_no_capture(check: Check):
    code, printed = check("inference.model = 'm'\n")
    assert code == 0
    assert "capture off: no source of the policy truncates" in printed
    by_hand = check("inference = {model = 'm', enable_return_sampling_mask = true}\n")[1]
    assert "capture on in inference-0.toml (auto): set by hand, no source truncates" in by_hand


def test_turns_on_one_gpu_are_told_and_what_does_not_go_with_them(check: Check):
    code, printed = check("inference.model = 'm'\n", "--colocated", "true")
    assert code == 0
    assert "gpu one for both: engine and trainer take turns (runs/run/gpu.lock)" in printed
    code, printed = check("inference.model = 'm'\n", "--colocated", "--orchestrator.max_async_level", "1")
    assert code == 1
    assert "refused [orchestrator] max_async_level = 1: asks for rollouts while the trainer steps" in printed


def test_unsafe_comparison_is_told(check: Check):
    assert (
        "replay nothing (unsafe_ignore_kept_tokens)"
        in check(MIXED, "--trainer.unsafe_ignore_kept_tokens", "true")[1]
    )


def test_reference_is_named(check: Check):
    reference = (
        "[orchestrator.train]\nreference = {url = 'http://r/v1', model = 'big'}\nalgorithm = {kind = 'opd'}\n"
    )
    code, printed = check("inference.model = 'm'\n" + reference)
    assert code == 0
    assert (
        "algorithm opd with the reference big at http://r/v1; compared with the rollout's logprobs" in printed
    )


def test_configs_of_every_node_are_written(check: Check, tmp_path: Path):
    code, printed = check(MIXED, "--write", tmp_path / "configs")
    assert code == 0
    written = sorted((tmp_path / "configs").iterdir())
    names = ["inference-0.toml", "inference-1.toml", "orchestrator.toml", "trainer.toml"]
    assert [path.name for path in written] == names
    assert all(f"wrote {path}" in printed for path in written)
    nodes = [tomllib.loads(path.read_text())["inference"] for path in written[:2]]
    assert [node["port"] for node in nodes] == [8100, 8200]
    assert all(node["enable_return_sampling_mask"] for node in nodes)
    for service, path in zip(("inference", "inference", "orchestrator", "trainer"), written, strict=True):
        load_service(service, ["--config", str(path)])


def test_a_config_that_listens_where_nobody_calls_is_noted(check: Check, tmp_path: Path):
    write = ("--write", tmp_path / "configs")
    code, printed = check(MIXED, *write)
    assert code == 0
    assert (
        'noted [inference] host = "127.0.0.1": hears this machine alone, and the orchestrator ca' in printed
    )
    assert "http://a:8100" in printed
    assert "http://b:8200" in printed
    assert "[inference] port" not in printed
    assert "[trainer]" not in printed
    code, printed = check(MIXED, *write, "--inference.host", "0.0.0.0")
    assert (code, "noted [inference] host" in printed) == (0, False)
    one = (
        "--orchestrator.inference_urls",
        '["http://127.0.0.1:9"]',
        "--orchestrator.trainer_url",
        "http://t:8",
    )
    code, printed = check(MIXED, *write, *one)
    assert code == 0
    assert "noted [inference] port = 8000: is not that of http://127.0.0.1:9, which is called" in printed
    assert 'noted [trainer] host = "127.0.0.1": hears this machine alone' in printed


def test_weights_by_nccl_between_machines_are_noted_to_need_all_ports(check: Check, tmp_path: Path):
    write = ("--write", tmp_path / "configs", "--weights.transfer")
    trainers = [("--orchestrator.trainer_url", f"http://{host}:8001") for host in ("t", "a")]
    told = 'noted [weights] transfer = "nccl": opens ports that NCCL chooses anew each time'
    assert told in check(MIXED, *write, "nccl", *trainers[0])[1]
    assert told not in check(MIXED, *write, "files", *trainers[0])[1]
    one = ("--orchestrator.inference_urls", '["http://a:8100"]')
    code, printed = check(MIXED, *write, "nccl", *trainers[1], *one)
    assert (code, told in printed) == (0, False)


def test_nothing_is_written_if_something_is_refused(check: Check, tmp_path: Path):
    code, printed = check(MIXED, "--write", tmp_path / "configs", "--orchestrator.train.sampling.top_k", 513)
    assert code == 1
    assert "top_k = 513: is more than a mask holds" in printed
    assert not (tmp_path / "configs").exists()


def test_ports_that_only_a_run_chooses_are_refused_for_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["check", str(DEMO)]) == 0
    assert main(["check", str(DEMO), "--write", str(tmp_path / "configs")]) == 1
    assert "[inference] port = 0: is chosen by keptset run only" in capsys.readouterr().out
    assert not (tmp_path / "configs").exists()


def test_configuration_of_the_documentation_is_accepted(check: Check):
    text = (Path(__file__).parents[3] / "docs" / "sources.md").read_text()
    example = text.partition("```toml\n")[2].partition("```")[0]
    code, printed = check("inference.model = 'm'\n" + example)
    assert code == 0, printed
    assert "train source sums" in printed
    assert "bound 200 ids a token: top_k [orchestrator.train.sampling]" in printed
    assert "share 6 of 8 prompts a step, 16 rollouts each" in printed


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_runs_that_come_along_are_not_refused(path, capsys):
    assert main(["check", str(path)]) == 0
    assert "refused nothing" in " ".join(capsys.readouterr().out.split())


def test_a_kind_of_the_command_line_is_noted_with_what_it_leaves_out(check: Check):
    code, text = check(DEMO.read_text(), "--trainer.loss.kind", "clipped_ratio")
    assert code == 0
    assert 'noted [trainer.loss] kind = "clipped_ratio": takes the place of geometric_mean' in text
    code, text = check(DEMO.read_text(), "--orchestrator.train.algorithm.kind", "opd")
    assert code == 1
    assert "unknown key" not in text
    assert "takes the place of grpo, so what was said of that kind is left out: normalize_std" in text


def test_a_top_k_that_is_refused_is_no_bound(check: Check):
    code, text = check(DEMO.read_text(), "--orchestrator.train.sampling.top_k", 1000)
    assert code == 1
    assert "bound refused: top_k = 1000 [orchestrator.train.sampling], and capture holds 512" in text
    assert "1000 ids a token" not in text
