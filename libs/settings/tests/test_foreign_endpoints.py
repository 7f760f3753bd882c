"""What a request to a frozen generator, an endpoint that is not ours, may hold."""

import pytest

from keptset_settings.sampling import FOREIGN_ELSEWHERE, FOREIGN_OURS

from .test_source_rules import FROZEN, refusal, resolved

pytestmark = pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")


def test_seed_that_is_never_sent_is_refused():
    seed = "[orchestrator.train.source.sampling]\nseed = 3\n"
    assert "seed = 3: is never sent, as send_seed of" in refusal(FROZEN, "send_seed = false\n", seed)
    resolved(FROZEN, "send_seed = false\n")
    resolved(FROZEN, seed)


@pytest.mark.parametrize("name", [*FOREIGN_ELSEWHERE, *FOREIGN_OURS])
def test_foreign_request_keeps_what_it_is_about(name: str):
    said = refusal(FROZEN, f"[orchestrator.train.source.sampling]\nextra_body = {{{name} = 1}}\n")
    assert f"[orchestrator.train.source[0].sampling.extra_body] {name} = 1: " in said
    assert said.endswith(FOREIGN_ELSEWHERE.get(name) or f"{FOREIGN_OURS.get(name)}; remove it")
    assert "inference.model" not in said


@pytest.mark.parametrize(
    "more",
    [
        "max_completion_tokens = 9",
        "response_format = {type = 'json_object'}",
        "reasoning_effort = 'low'",
        "skip_special_tokens = false",
    ],
)
def test_foreign_endpoint_may_have_parameters_of_its_own(more: str):
    resolved(FROZEN, f"[orchestrator.train.source.sampling]\nextra_body = {{{more}}}\n")
    assert "[orchestrator.train.sampling.extra_body]" in refusal(
        f"[orchestrator.train.sampling]\nextra_body = {{{more}}}\n"
    )
