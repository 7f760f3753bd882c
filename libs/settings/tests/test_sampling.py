"""Each rule of a policy source's sampling: its refusal with its text, and the neighbour that works."""

import pytest

from keptset_settings import RunSettings, SettingsError, SettingsWarning, is_truncating, resolve_run
from keptset_settings.orchestrator import SamplingSettings
from keptset_settings.sampling import BENDING, ELSEWHERE, HARMLESS, OURS


def run_with(*sources: dict, **shared) -> RunSettings:
    return RunSettings.model_validate(
        {
            "inference": {"model": "m"},
            "orchestrator": {
                "train": {
                    "sampling": shared,
                    "source": [{"name": f"s{i}", "sampling": s} for i, s in enumerate(sources or ({},))],
                }
            },
        }
    )


def problem_of(run: RunSettings) -> str:
    with pytest.raises(SettingsError) as error:
        resolve_run(run)
    return str(error.value)


TABLE = "[orchestrator.train.sampling] "


@pytest.mark.parametrize(
    ("name", "value", "line", "neighbours"),
    [
        (
            "temperature",
            0.0,
            "temperature = 0.0: is greedy: every rollout of a prompt is the same",
            [0.01, 2.0],
        ),
        ("temperature", -1.0, "temperature = -1.0: is negative; set 0.01 to 2.0, 1.0 is neutral", [1.0]),
        ("temperature", 0.00999, "temperature = 0.00999: is sampled at 0.01 by vLLM", [0.01]),
        ("temperature", 2.01, "temperature = 2.01: is more than vLLM takes (2.0); set 0.01 to 2.0", [2.0]),
        ("top_p", 0.0, "top_p = 0.0: must be above 0 and at most 1; 1.0 switches it off", [1e-9]),
        ("top_p", 1.01, "top_p = 1.01: must be above 0 and at most 1; 1.0 switches it off", [1.0]),
        ("top_k", -2, "top_k = -2: must be 1 to 512; -1 switches it off", [-1, 0, 1]),
        ("top_k", 513, "top_k = 513: is more than a mask holds; set at most 512, or -1", [512]),
        ("min_p", -0.1, "min_p = -0.1: must be at least 0 and less than 1; 0.0 switches it off", [0.0]),
        ("min_p", 1.0, "min_p = 1.0: must be at least 0 and less than 1; 0.0 switches it off", [0.99]),
        (
            "max_tokens",
            0,
            "max_tokens = 0: must be at least 1; leave it out for the rest of the context",
            [1],
        ),
        ("seed", -1, "seed = -1: must be at least 0; leave it out to take orchestrator.seed", [0]),
    ],
)
@pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")
def test_bounds_of_typed_parameters(name, value, line, neighbours):
    # trl#6944: temperature 0.005 is clamped to 0.01 by the engine only
    assert TABLE + line in problem_of(run_with(**{name: value}))
    for neighbour in neighbours:
        resolved = resolve_run(run_with(**{name: neighbour})).orchestrator.train.source[0].sampling
        if name != "top_k":
            assert getattr(resolved, name) == neighbour


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "temperature",
            0.5,
            "temperature = 0.5: does not belong here; set temperature in the sampling table itself",
        ),
        ("top_p", 0.9, "top_p = 0.9: does not belong here; set top_p in"),
        ("top_k", 5, "top_k = 5: does not belong here; set top_k in"),
        ("min_p", 0.1, "min_p = 0.1: does not belong here; set min_p in"),
        ("max_tokens", 9, "max_tokens = 9: does not belong here; set max_tokens in"),
        ("max_completion_tokens", 9, "max_completion_tokens = 9: does not belong here; set max_tokens in"),
        ("seed", 9, "seed = 9: does not belong here; set seed in"),
        (
            "n",
            4,
            "n = 4: does not belong here; set group_size of the source, or orchestrator.train.group_size",
        ),
        ("response_format", "json", 'response_format = "json": does not belong here; set structured_outputs'),
        ("logprobs", 5, "logprobs = 5: is decided by Keptset: the sampled token's logprob comes with"),
        ("prompt_logprobs", 1, "prompt_logprobs = 1: is decided by Keptset: prompts are not trained on"),
        ("detokenize", True, "detokenize = true: is decided by Keptset: rollouts are token ids; remove it"),
        (
            "kept_tokens",
            False,
            "kept_tokens = false: is decided by Keptset: truncation asks for masks by itself",
        ),
        ("presence_penalty", 0.5, "presence_penalty = 0.5: bends the logits of the tokens that stay"),
        ("frequency_penalty", -1, "frequency_penalty = -1: bends the logits"),
        ("repetition_penalty", 1.1, "repetition_penalty = 1.1: bends the logits"),
        ("repetition_penalty", True, "repetition_penalty = true: bends the logits"),
        ("logit_bias", {"3": 1.0}, "logit_bias: bends the logits"),
        ("thinking_token_budget", 0, "thinking_token_budget = 0: bends the logits"),
        ("watermarking", True, "watermarking = true: bends the logits"),
        ("logits_processors", ["x"], "logits_processors = ['x']: is decided by Keptset: requests bring none"),
        ("stopp", ["a"], "stopp = ['a']: unknown sampling parameter, did you mean stop?"),
        ("min-tokens", 1, "min-tokens = 1: unknown sampling parameter, did you mean min_tokens?"),
        ("zzzzz", 1, "zzzzz = 1: unknown sampling parameter, known here: "),
        ("stop", [""], "stop = ['']: must be text or a list of texts, none empty"),
        ("stop_token_ids", [-1], "stop_token_ids = [-1]: must be a list of token ids"),
        ("ignore_eos", 1, "ignore_eos = 1: must be true or false"),
        ("min_tokens", -1, "min_tokens = -1: must be a whole number of at least 0"),
        ("min_tokens", True, "min_tokens = true: must be a whole number of at least 0"),
        ("bad_words", "x", 'bad_words = "x": must be a list of texts, none empty'),
        ("allowed_token_ids", [], "allowed_token_ids = []: must be a list of at least one token id"),
        (
            "structured_outputs",
            {"regex": "a", "json": "b"},
            "structured_outputs: must be a table with one of json",
        ),
        ("structured_outputs", {}, "structured_outputs: must be a table with one of json"),
        ("stop", None, "stop: holds a null, which TOML has not; leave it out for the default"),
        ("structured_outputs", {"json": None}, "structured_outputs: holds a null"),
    ],
)
def test_what_extra_body_may_not_hold(name, value, line):
    expected = f"[orchestrator.train.sampling.extra_body] {line}"
    assert expected in problem_of(run_with(extra_body={name: value}))


@pytest.mark.parametrize("name", [*ELSEWHERE, *OURS])
def test_every_key_that_is_set_elsewhere_is_refused_with_its_way_out(name):
    said = problem_of(run_with(extra_body={name: 1}))
    assert said.startswith(f"[orchestrator.train.sampling.extra_body] {name} = 1: ")
    if name in ELSEWHERE:
        assert said.endswith(f": does not belong here; {ELSEWHERE[name]}")
    else:
        assert said.endswith(f": is decided by Keptset: {OURS[name]}; remove it")


@pytest.mark.parametrize("name", BENDING)
def test_every_key_that_bends_logits_is_refused_but_for_its_neutral_value(name):
    for neutral in BENDING[name]:
        resolve_run(run_with(extra_body={name: neutral}))
    for bends in (0.5, {"3": 1.0}, ["x"], True):
        assert f"{name}" in problem_of(run_with(extra_body={name: bends})).partition(": bends the logits")[0]


WRONG = {
    "stop": [5, "", ["a", ""], [3]],
    "stop_token_ids": [5, [-1], ["a"], [1.5], [True]],
    "ignore_eos": [0, "no"],
    "skip_reading_prefix_cache": ["yes", 0],
    "repetition_detection": [True, 3, [], {"max_patern_size": 3}, {"min_count": -1}, {"min_count": "4"}],
    "min_tokens": [-1, 1.5, "3", True],
    "bad_words": ["x", [""], [3]],
    "allowed_token_ids": [[], 3, [-1], ["a"]],
    "structured_outputs": [{}, "json", {"regex": "a", "json": "b"}, {"regexp": "a"}],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_every_key_that_passes_must_be_of_its_form(name):
    """What each takes is in test_what_extra_body_may_hold."""
    for value in WRONG[name]:
        assert f" must be {HARMLESS[name][0]}" in problem_of(run_with(extra_body={name: value}))


@pytest.mark.parametrize(
    ("name", "value", "truncates"),
    [
        ("stop", "a", False),
        ("stop", ["a", "b"], False),
        ("stop_token_ids", [0, 7], False),
        ("ignore_eos", True, False),
        ("skip_reading_prefix_cache", True, False),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 4}, False),
        ("min_tokens", 0, False),
        ("min_tokens", 1, True),
        ("bad_words", [], False),
        ("bad_words", ["x"], True),
        ("allowed_token_ids", [3], True),
        ("structured_outputs", {"regex": "a"}, True),
        ("presence_penalty", 0.0, False),
        ("frequency_penalty", 0, False),
        ("repetition_penalty", 1.0, False),
        ("logit_bias", {}, False),
        ("watermarking", False, False),
    ],
)
@pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")
def test_what_extra_body_may_hold(name, value, truncates):
    run = resolve_run(run_with(extra_body={name: value}))
    sampling = run.orchestrator.train.source[0].sampling
    assert sampling.extra_body == {name: value}
    assert is_truncating(sampling) is truncates
    assert sampling.top_k == (512 if truncates else -1)
    assert run.inference.enable_return_sampling_mask is truncates


def test_min_tokens_fit_into_max_tokens():
    run = run_with(max_tokens=4, top_k=9, extra_body={"min_tokens": 5})
    assert "min_tokens = 5: is more than max_tokens = 4; lower it" in problem_of(run)
    resolve_run(run_with(max_tokens=5, top_k=9, extra_body={"min_tokens": 5}))


@pytest.mark.parametrize(
    "shared", [{"top_p": 0.99}, {"min_p": 0.01}, {"top_p": 0.9, "top_k": -1}, {"min_p": 0.1, "top_k": 0}]
)
def test_a_truncating_source_without_bound_gets_512_with_a_warning(shared):
    with pytest.warns(
        SettingsWarning, match=r"source\[0\].sampling\] top_k: sets no bound, but .* 512 is used"
    ):
        run = resolve_run(run_with(**shared))
    assert run.orchestrator.train.source[0].sampling.top_k == 512
    assert run.orchestrator.train.sampling.top_k == shared.get("top_k")


@pytest.mark.parametrize(
    "shared", [{"top_p": 0.99, "top_k": 50}, {"top_k": 512}, {}, {"top_p": 1.0, "temperature": 0.6}]
)
def test_no_warning_where_nothing_was_chosen(shared, recwarn):
    resolve_run(run_with(**shared))
    assert not [w for w in recwarn if issubclass(w.category, SettingsWarning)]


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.99}, {"top_k": 1}, {"min_p": 0.01}, {"extra_body": {"min_tokens": 1}}]
)
def test_what_limits_the_support_truncates(sampling):
    assert is_truncating(SamplingSettings.model_validate(sampling))


@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, {"top_k": -1, "temperature": 0.3}]
)
def test_what_does_not_limit_the_support_does_not(sampling):
    assert not is_truncating(SamplingSettings.model_validate(sampling))


def test_a_source_inherits_what_it_leaves_unset():
    run = run_with(
        {"top_p": 0.5, "extra_body": {"stop": "b", "ignore_eos": True}},
        {"temperature": 0.7, "top_k": 8, "max_tokens": 3, "seed": 2},
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        max_tokens=9,
        seed=1,
        extra_body={"stop": "a", "skip_reading_prefix_cache": False},
    )
    first, second = (source.sampling for source in resolve_run(run).orchestrator.train.source)
    assert first.model_dump() == {
        "temperature": 0.6,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.0,
        "max_tokens": 9,
        "seed": 1,
        "extra_body": {"stop": "b", "skip_reading_prefix_cache": False, "ignore_eos": True},
    }
    assert second.model_dump() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 8,
        "min_p": 0.0,
        "max_tokens": 3,
        "seed": 2,
        "extra_body": {"stop": "a", "skip_reading_prefix_cache": False},
    }


def test_unset_parameters_are_neutral():
    # NeMo-RL#3497, verl#702: the model's generation_config brought a penalty
    sampling = resolve_run(run_with()).orchestrator.train.source[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert (sampling.max_tokens, sampling.seed) == (None, None)


def test_a_problem_names_the_table_that_wrote_the_value():
    text = problem_of(
        run_with({}, {"top_p": 7.0, "extra_body": {"n": 2}}, temperature=0.0, extra_body={"seed": 3})
    )
    assert [line.split(" =")[0] for line in text.splitlines()] == [
        "[orchestrator.train.sampling] temperature",
        "[orchestrator.train.sampling.extra_body] seed",
        "[orchestrator.train.source[1].sampling] top_p",
        "[orchestrator.train.source[1].sampling.extra_body] n",
    ]
