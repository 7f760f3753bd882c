"""`keptset check`: what it says of a configuration, its exit code, and the configs that it writes."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from keptset.__main__ import main
from keptset_settings import load_service

DEMO = Path(__file__).parents[1] / "reverse-text.toml"

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
        "share 25 % of 8 prompts a step, 16 rollouts each",
        "train source books generator frozen: teacher at https://h/v1",
        "truncates as it likes (top_p): nothing of it is replayed bound none: it is exempt algorithm sft",
        "share 25 % of 8 prompts a step, 2 rollouts each",
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
        "capture on in inference-0.toml to inference-1.toml (auto): math, narrow truncates",
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


def test_capture_switched_off_by_hand_is_refused(check: Check):
    code, printed = check(MIXED, "--inference.enable_return_sampling_mask", "false")
    assert code == 1
    assert "refused [inference] enable_return_sampling_mask = false: but math, narrow truncates" in printed


def test_no_truncation_needs_no_capture(check: Check):
    code, printed = check("inference.model = 'm'\n")
    assert code == 0
    assert "capture off: no source of the policy truncates" in printed
    by_hand = check("inference = {model = 'm', enable_return_sampling_mask = true}\n")[1]
    assert "capture on in inference-0.toml (auto): set by hand, no source truncates" in by_hand


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
    assert "share 75 % of 8 prompts a step, 16 rollouts each" in printed
