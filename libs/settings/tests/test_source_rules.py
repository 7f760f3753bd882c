"""Rules between generator, sampling, algorithm and filters: each refusal, and the neighbour that works."""

import tomllib

import pytest

from keptset_settings import (
    GibberishFilter,
    GrpoAlgorithm,
    OrchestratorSettings,
    RepetitionFilter,
    RunSettings,
    SettingsError,
    SftAlgorithm,
    ZeroAdvantageFilter,
    policy_sources,
    resolve_orchestrator,
    resolve_run,
    to_toml,
    uses_full_scores,
)

pytestmark = pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")

REFERENCE = "[orchestrator.train.reference]\nurl = 'http://127.0.0.1:9/v1'\nmodel = 'teacher'\n"
TRUNCATION = "[orchestrator.train.sampling]\ntop_p = 0.9\ntop_k = 50\n"
SOURCE = "[[orchestrator.train.source]]\nname = 'math'\n"
GENERATOR = "[orchestrator.train.source.generator]\nkind = 'frozen'\nurl = 'https://h/v1'\nmodel = 'm'\n"
FROZEN = f"[[orchestrator.train.source]]\nname = 'books'\n{GENERATOR}"
SCORES = "[trainer]\nfull_vocabulary_scores = true\n"


def resolved(*parts: str) -> RunSettings:
    return resolve_run(RunSettings.model_validate(tomllib.loads("inference.model = 'm'\n" + "".join(parts))))


def refusal(*parts: str) -> str:
    with pytest.raises(SettingsError) as error:
        resolved(*parts)
    return str(error.value)


def algorithm(kind: str, *lines: str, of: str = "source.") -> str:
    return "\n".join([f"[orchestrator.train.{of}algorithm]", f"kind = '{kind}'", *lines, ""])


COMPARES = "compares logprobs over the whole vocabulary, but math truncates (top_p, top_k), so those of its"
REMEDY = (
    "set trainer.full_vocabulary_scores = true, or sample without truncation (top_p = 1.0, top_k = -1, min_p"
)


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (("opd",), '[orchestrator.train.source[0].algorithm] kind = "opd": '),
        (("opsd",), '[orchestrator.train.source[0].algorithm] kind = "opsd": '),
        (("grpo", "reference_kl = 0.1"), "[orchestrator.train.source[0].algorithm] reference_kl = 0.1: "),
        (("rloo", "reference_kl = 0.1"), "[orchestrator.train.source[0].algorithm] reference_kl = 0.1: "),
        (("max_rl", "reference_kl = 0.1"), "[orchestrator.train.source[0].algorithm] reference_kl = 0.1: "),
    ],
)
def test_comparison_with_a_reference_is_refused_under_truncation(lines, place):
    said = refusal(REFERENCE, TRUNCATION, SOURCE, algorithm(*lines))
    assert said.startswith(place + COMPARES)
    assert REMEDY in said
    assert uses_full_scores(resolved(REFERENCE, SOURCE, algorithm(*lines)).orchestrator.train.source[0])
    run = resolved(REFERENCE, TRUNCATION, SCORES, SOURCE, algorithm(*lines))
    assert run.inference.enable_return_sampling_mask


@pytest.mark.parametrize("kind", ["grpo", "rloo", "max_rl"])
def test_algorithms_on_rewards_work_under_truncation(kind):
    run = resolved(TRUNCATION, SOURCE, algorithm(kind))
    assert run.orchestrator.train.source[0].algorithm.kind == kind
    assert run.inference.enable_return_sampling_mask
    assert not uses_full_scores(run.orchestrator.train.source[0])


def test_inherited_algorithm_is_refused_where_it_was_written():
    said = refusal(REFERENCE, TRUNCATION, algorithm("opd", of=""), SOURCE)
    assert said.startswith('[orchestrator.train.algorithm] kind = "opd": ' + COMPARES)
    run = resolved(REFERENCE, TRUNCATION, algorithm("opd", of=""), SOURCE, algorithm("grpo"))
    assert run.orchestrator.train.source[0].algorithm == GrpoAlgorithm()


@pytest.mark.parametrize("lines", [("opd",), ("grpo", "reference_kl = 0.5")])
def test_reference_must_be_named(lines):
    said = refusal(SOURCE, algorithm(*lines))
    assert "needs somebody to score the rollouts of math; set url and model in [orchestrator.train" in said
    own = "[orchestrator.train.source.reference]\nurl = 'http://127.0.0.1:9/v1'\nmodel = 'other'\n"
    run = resolved(REFERENCE, SOURCE, algorithm(*lines), own)
    assert run.orchestrator.train.source[0].reference.model == "other"
    assert resolved(REFERENCE, SOURCE, algorithm(*lines)).orchestrator.train.source[0].reference.model == (
        "teacher"
    )


def test_self_distillation_needs_no_reference():
    assert resolved(SOURCE, algorithm("opsd")).orchestrator.train.source[0].reference is None


@pytest.mark.parametrize("lines", [("opd",), ("opsd",), ("rloo", "reference_kl = 0.5")])
def test_reference_is_scored_at_temperature_1(lines):
    cool = "[orchestrator.train.sampling]\ntemperature = 0.6\n"
    said = refusal(REFERENCE, cool, SOURCE, algorithm(*lines))
    assert "reference that is scored at temperature 1.0, but math samples at 0.6; set temperature" in said
    resolved(REFERENCE, cool, SOURCE, "sampling.temperature = 1.0\n", algorithm(*lines))
    resolved(REFERENCE, cool, SOURCE, algorithm("rloo"))


@pytest.mark.parametrize("kind", ["gibberish", "repetition"])
def test_filter_with_full_softmax_thresholds_is_refused_under_truncation(kind):
    shared = f"[[orchestrator.train.filter]]\nkind = '{kind}'\n"
    said = refusal(TRUNCATION, shared, SOURCE)
    assert said.startswith(
        f'[orchestrator.train.filter[0]] kind = "{kind}": has thresholds for logprobs over the whole '
        "vocabulary, but math truncates (top_p, top_k), so those of its rollouts are over the kept sets; "
        "give math a filter list without it, or [], or sample without truncation"
    )
    (kept,) = resolved(shared, SOURCE).orchestrator.train.source[0].filter
    assert (kept.kind, kept.enforce) == (kind, True)
    assert resolved(TRUNCATION, shared, SOURCE, "filter = []\n").orchestrator.train.source[0].filter == []


def test_own_filter_is_refused_in_its_source():
    own = "[[orchestrator.train.source.filter]]\nkind = 'zero_advantage'\n"
    said = refusal(TRUNCATION, SOURCE, own, "[[orchestrator.train.source.filter]]\nkind = 'gibberish'\n")
    assert said.startswith('[orchestrator.train.source[0].filter[1]] kind = "gibberish": has thresholds')
    assert "remove it, or" in said
    run = resolved(TRUNCATION, SOURCE, own)
    assert run.orchestrator.train.source[0].filter == [ZeroAdvantageFilter()]


def test_filters_leave_the_default_list_by_themselves():
    second = "[[orchestrator.train.source]]\nname = 'plain'\nsampling = {top_p = 1.0, top_k = -1}\n"
    cut, plain = resolved(TRUNCATION, SOURCE, second).orchestrator.train.source
    assert cut.filter == []
    assert plain.filter == [GibberishFilter(enforce=False), RepetitionFilter(enforce=False)]


def test_frozen_source_stands_beside_a_truncating_one():
    """It may truncate as it likes: exempt from the bound, and from masks."""
    own = "[orchestrator.train.source.sampling]\ntop_p = 0.9\ntemperature = 0.0\n"
    run = resolved(TRUNCATION, SOURCE, FROZEN, own)
    policy, frozen = run.orchestrator.train.source
    assert policy.sampling.top_k == 50
    assert frozen.sampling.model_dump(exclude_none=True) == {
        "top_p": 0.9,
        "temperature": 0.0,
        "extra_body": {},
    }
    assert frozen.algorithm == SftAlgorithm()
    assert [source.name for _, source in policy_sources(run.orchestrator)] == ["math"]


def test_frozen_source_alone_switches_no_capture_on():
    run = resolved(FROZEN, "[orchestrator.train.source.sampling]\ntop_p = 0.9\n")
    assert not run.inference.enable_return_sampling_mask


def test_frozen_rollouts_are_trained_on_by_cross_entropy_only():
    said = refusal(FROZEN, algorithm("grpo"))
    assert said.startswith(
        '[orchestrator.train.source[0].algorithm] kind = "grpo": needs the policy\'s own rollouts with their '
        'logprobs, but the generator of books is frozen, another model; set "sft"'
    )
    run = resolved(algorithm("rloo", of=""), FROZEN, algorithm("sft", "min_reward = 0.5"))
    assert run.orchestrator.train.source[0].algorithm == SftAlgorithm(min_reward=0.5)
    assert resolved(algorithm("rloo", of=""), FROZEN).orchestrator.train.source[0].algorithm.kind == "sft"


def test_cross_entropy_needs_a_frozen_generator():
    said = refusal(SOURCE, algorithm("sft"))
    assert "trains on another model's rollouts, but math is sampled by the policy; give it a [gener" in said
    assert resolved(SOURCE, GENERATOR, algorithm("sft")).orchestrator.train.source[0].algorithm.kind == "sft"
    assert resolved(SOURCE, algorithm("grpo")).orchestrator.train.source[0].algorithm.kind == "grpo"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("reference = {url = 'http://h', model = 'm'}\n", "reference: means nothing to a frozen generator"),
        ("filter = [{kind = 'zero_advantage'}]\n", "filter: means nothing to a frozen generator"),
    ],
)
def test_what_means_nothing_to_a_frozen_generator(lines, text):
    assert text in refusal("[[orchestrator.train.source]]\nname = 'books'\n", lines, GENERATOR)
    shared = "[[orchestrator.train.filter]]\nkind = 'zero_advantage'\n"
    resolved(REFERENCE, shared, "[[orchestrator.train.source]]\nname = 'books'\n", GENERATOR)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("temperature = 2.5", "temperature = 2.5: must be 0.0 to 2.0"),
        ("top_p = 0.0", "top_p = 0.0: must be above 0"),
        ("top_k = -2", "top_k = -2: must be at least 1; -1 switches it off"),
        ("min_p = 1.0", "min_p = 1.0: must be at least 0 and less than 1"),
        ("max_tokens = 0", "max_tokens = 0: must be at least 1"),
        ("extra_body = {top_p = 0.9}", "top_p = 0.9: does not belong here; set top_p in the sampling table"),
    ],
)
def test_what_nobody_takes_is_refused_without_replay_too(line, text):
    frozen = f"[orchestrator.train.source.sampling]\n{line}\n"
    assert text in refusal(FROZEN, frozen)
    assert text in refusal(f"[[orchestrator.eval.source]]\n[orchestrator.eval.source.sampling]\n{line}\n")


def test_evaluation_samples_as_it_likes():
    """Greedy, truncated without bound, penalised: nothing of it is trained on, so nothing is replayed."""
    free = "temperature = 0.0\ntop_p = 0.5\ntop_k = 1000\nextra_body = {presence_penalty = 0.5}\n"
    run = resolved(
        f"[[orchestrator.eval.source]]\nname = 'held-out'\n[orchestrator.eval.source.sampling]\n{free}"
    )
    (evaluated,) = run.orchestrator.eval.source
    assert (evaluated.sampling.top_k, evaluated.sampling.temperature) == (1000, 0.0)
    assert not run.inference.enable_return_sampling_mask
    assert "top_k = 1000" in refusal("[orchestrator.train.sampling]\ntop_k = 1000\n")


def test_evaluation_inherits_no_sampling():
    run = resolved(TRUNCATION, "[[orchestrator.eval.source]]\n")
    assert run.orchestrator.eval.source[0].sampling.top_p == 1.0


def test_evaluation_may_not_set_what_keptset_sets():
    own = (
        "[[orchestrator.eval.source]]\n[orchestrator.eval.source.sampling]\nextra_body = {kept_tokens = true}"
    )
    assert "kept_tokens = true: is decided by Keptset" in refusal(own)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("extra_body = {repetition_penaltyy = 1.1}", "repetition_penaltyy = 1.1: unknown sampling parameter"),
        ("extra_body = {TOP_P = 0.9}", "TOP_P = 0.9: unknown sampling parameter, did you mean top_p?"),
        ("extra_body = {stop = 5}", "stop = 5: must be text or a list of texts"),
        ("max_tokens = 4\nextra_body = {min_tokens = 5}", "min_tokens = 5: is more than max_tokens = 4"),
    ],
)
def test_evaluation_is_refused_before_the_start_what_the_engine_would_refuse_after_many_steps(lines, text):
    assert text in refusal(f"[[orchestrator.eval.source]]\n[orchestrator.eval.source.sampling]\n{lines}\n")


def test_greedy_evaluation_is_of_one_rollout_a_prompt():
    """VLLM refuses n > 1 at temperature 0."""
    greedy = "[[orchestrator.eval.source]]\ngroup_size = {}\nsampling = {{temperature = {}}}\n"
    said = refusal(greedy.format(4, 0.0))
    assert said.startswith("[orchestrator.eval.source[0]] group_size = 4: asks for the same greedy rollout")
    resolved(greedy.format(1, 0.0))
    resolved(greedy.format(4, 0.01))


POLICY = [
    "http://127.0.0.1:8000",
    "http://127.0.0.1:8000/v1",
    "http://localhost:8000/v1/",
    "http://[::1]:8000/v1",
]


@pytest.mark.parametrize("url", POLICY)
def test_the_policy_is_no_frozen_generator(url: str):
    """Its rollouts would be trained on without kept sets: truncation that no rule sees."""
    frozen = f"[[orchestrator.train.source]]\nname = 'b'\n{GENERATOR.replace('https://h/v1', '{}')}"
    said = refusal(frozen.format(url))
    assert said.startswith(
        f'[orchestrator.train.source[0].generator] url = "{url.rstrip("/")}": is one of orch'
    )
    assert "so b would be sampled by the policy, without kept sets and importance ratio" in said
    for other in ("http://127.0.0.1:8009/v1", "http://h:8000/v1", "http://127.0.0.1:8000/other/v1"):
        resolved(frozen.format(other))


@pytest.mark.parametrize("url", POLICY)
def test_the_policy_is_no_reference_of_its_own(url: str):
    shared = f"orchestrator.train.reference = {{url = '{url}', model = 'm'}}\n"
    said = refusal(shared, SOURCE, algorithm("opd"))
    assert said.startswith(
        f'[orchestrator.train.reference] url = "{url.rstrip("/")}": is one of orchestrator.inf'
    )
    own = f"reference = {{url = '{url}', model = 'm'}}\n"
    said = refusal(SOURCE, own, algorithm("opd"))
    assert said.startswith(
        f'[orchestrator.train.source[0].reference] url = "{url.rstrip("/")}": is one of orchestrator.inf'
    )
    assert (
        "so math would be compared with the policy itself; name a server of its own, or choose opsd" in said
    )
    resolved(SOURCE, algorithm("opsd"))
    resolved(SOURCE, own.replace("8000", "8009"), algorithm("opd"))


def test_reference_that_nobody_would_ask_is_refused():
    own = "reference = {url = 'http://r/v1', model = 'm'}\n"
    said = refusal(SOURCE, own)
    assert said.startswith(
        "[orchestrator.train.source[0]] reference: would never be asked: grpo compares with it"
    )
    assert "the reference of opsd is the policy itself" in refusal(SOURCE, own, algorithm("opsd"))
    (source,) = resolved(SOURCE, own, algorithm("grpo", "reference_kl = 0.1")).orchestrator.train.source
    assert source.reference is not None
    (source,) = resolved(REFERENCE, SOURCE, algorithm("opsd")).orchestrator.train.source
    assert source.reference is None, "a shared one is for those that compare with it"


def test_frozen_source_takes_the_shared_sft():
    shared = algorithm("sft", "min_reward = 0.5", of="")
    assert resolved(shared, FROZEN).orchestrator.train.source[0].algorithm == SftAlgorithm(min_reward=0.5)
    own = resolved(shared, FROZEN, algorithm("sft")).orchestrator.train.source[0].algorithm
    assert own == SftAlgorithm()


def test_evaluation_sources_differ_in_name_among_themselves_only():
    two = "[[orchestrator.eval.source]]\nname = 'a'\n[[orchestrator.eval.source]]\nname = '{}'\n"
    assert '[orchestrator.eval.source[1]] name = "a": is the name of source[0]' in refusal(two.format("a"))
    resolved(two.format("b"), "[[orchestrator.train.source]]\nname = 'a'\n")


def test_context_has_room_for_a_prompt_of_the_evaluation():
    both = "inference.vllm.max_model_len = {}\n[[orchestrator.eval.source]]\nsampling = {{max_tokens = 64}}\n"
    assert "leaves no room for a prompt beside max_tokens = 64 (eval reverse-text)" in refusal(
        both.format(64)
    )
    resolved(both.format(65))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "max_rl"])
def test_group_of_one_has_no_baseline(kind):
    said = refusal(SOURCE, "group_size = 1\n", algorithm(kind))
    assert "compares the rollouts of a prompt, but group_size of math is 1; set at least 2" in said
    assert resolved(SOURCE, "group_size = 2\n", algorithm(kind)).orchestrator.train.source[0].group_size == 2
    resolved(REFERENCE, SOURCE, "group_size = 1\n", algorithm("opd"))


def test_source_inherits_its_group_size():
    run = resolved("orchestrator.train.group_size = 5\n", SOURCE, FROZEN, "")
    assert [source.group_size for source in run.orchestrator.train.source] == [5, 5]


def test_api_keys_are_named_and_not_written():
    def keyed(name: str) -> str:
        return f"{REFERENCE}api_key_env = '{name}'\n"

    for wrong in ("sk-123", "KEPTSET_KEY", ""):
        with pytest.raises(ValueError, match="must be the name of an environment variable"):
            resolved(keyed(wrong))
    assert "TEACHER_KEY" in to_toml(resolved(keyed("TEACHER_KEY")))


def test_lone_orchestrator_leaves_full_scores_to_the_trainer():
    settings = OrchestratorSettings.model_validate(
        {
            "inference_urls": ["http://i"],
            "trainer_url": "http://t",
            "tokenizer": "m",
            "output_dir": "o",
            "train": {
                "sampling": {"top_p": 0.9, "top_k": 50},
                "algorithm": {"kind": "opsd"},
            },
        }
    )
    assert resolve_orchestrator(settings).train.source[0].algorithm.kind == "opsd"


def test_resolved_sources_resolve_to_themselves():
    once = resolved(
        REFERENCE, TRUNCATION, SCORES, SOURCE, algorithm("opd"), FROZEN, "[[orchestrator.eval.source]]\n"
    )
    assert resolve_run(once) == once
    assert resolve_run(RunSettings.model_validate(tomllib.loads(to_toml(once)))) == once
