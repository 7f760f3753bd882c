"""The way out that a refusal names is one: what it says is done, and then it resolves."""

import warnings

import pytest

from keptset_settings import RunSettings, SettingsError, SettingsWarning, resolve_run
from keptset_settings.sampling import BENDING

from .test_source_rules import refusal, resolved

SOURCE = "[[orchestrator.train.source]]\nname = 'math'\n"
EVAL = "[[orchestrator.eval.source]]\nname = 'held-out'\n"
FROZEN = f"{SOURCE}generator = {{kind = 'frozen', url = 'https://h/v1', model = 'm'}}\n"


@pytest.mark.parametrize("source", [SOURCE, EVAL, FROZEN])
def test_rollouts_of_a_prompt_are_set_at_the_source(source):
    """An evaluation has a group size of its own, and takes none from [orchestrator.train]."""
    said = refusal(source, "sampling = {extra_body = {n = 4}}\n")
    assert "n = 4: does not belong here; set group_size of the source, or orchestrator.train.gr" in said
    run = resolved(source, "group_size = 4\n").orchestrator
    assert (run.eval.source or run.train.source)[0].group_size == 4


@pytest.mark.parametrize("source", [SOURCE, EVAL, FROZEN])
def test_a_seed_that_is_left_out_is_the_orchestrators(source):
    said = refusal(source, "sampling = {seed = -1}\n")
    assert "seed = -1: must be at least 0; leave it out to take orchestrator.seed" in said
    resolved(source)


REFERENCE = "orchestrator.train.reference = {url = 'http://r/v1', model = 'm'}\n"


@pytest.mark.parametrize("source", [SOURCE, FROZEN, f"{SOURCE}algorithm = {{kind = 'opsd'}}\n"])
def test_a_shared_reference_that_nobody_asks_is_told(source):
    """A forgotten reference_kl trains without the penalty that the reference was named for."""
    with pytest.warns(SettingsWarning, match=r"\[orchestrator.train\] reference: is never asked, as no sou"):
        resolved(REFERENCE, source)


@pytest.mark.parametrize("algorithm", ["kind = 'opd'", "kind = 'rloo', reference_kl = 0.1"])
def test_a_shared_reference_that_one_source_asks_is_no_news(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = resolved(REFERENCE, SOURCE, f"algorithm = {{{algorithm}}}\n", FROZEN.replace("math", "books"))
        resolve_run(run)


BENT = {
    "presence_penalty": ([-2, 0.5, 2.0], ["x", 2.1, True, [], float("nan")]),
    "frequency_penalty": ([-2, 0.5, 2.0], ["x", -2.1, False]),
    "repetition_penalty": ([0.1, 1, 1.3], [0, -1.0, "1", float("inf")]),
    "logit_bias": ([{}, {"3": 1.5}], [{"a": 1.0}, {"3": "x"}, [3], 1]),
    "thinking_token_budget": ([-1, 0, 100], [-2, 1.5, True, "x"]),
    "watermarking": ([True, False], [1, "true"]),
}


def evaluating(name: str, value: object) -> RunSettings:
    source = {"sampling": {"temperature": 0.7, "extra_body": {name: value}}}
    return resolve_run(
        RunSettings.model_validate(
            {"inference": {"model": "m"}, "orchestrator": {"eval": {"source": [source]}}}
        )
    )


@pytest.mark.parametrize("name", BENDING)
def test_what_bends_an_evaluation_must_be_of_its_form(name):
    """The engine would refuse it when the evaluation's turn comes, after many steps."""
    good, bad = BENT[name]
    for value in good:
        evaluating(name, value)
    for value in bad:
        with pytest.raises(SettingsError, match=f"{name}.*: must be "):
            evaluating(name, value)
