"""What a run's tables take from each other, and the rules between them."""

import tomllib
from pathlib import Path

import pytest

from keptset_settings import (
    OrchestratorSettings,
    RunSettings,
    SettingsError,
    TrainerSettings,
    load_service,
    resolve_orchestrator,
    resolve_run,
    resolve_trainer,
    to_toml,
)
from keptset_settings.resolve import reachable


def run_of(text: str) -> RunSettings:
    return RunSettings.model_validate(tomllib.loads(text))


def problem_of(text: str) -> str:
    with pytest.raises(SettingsError) as error:
        resolve_run(run_of(text))
    return str(error.value)


MODEL = "inference.model = 'm'\n"


def test_a_warm_started_model_is_everybodys_model():
    run = resolve_run(run_of("runs_dir = 'r'\nwarm_start = {min_letters = 3, seed = 7}"))
    assert run.warm_start.directory == Path("r/models/reverse-text-3-12-seed7")
    names = {run.inference.model, run.trainer.model, run.orchestrator.tokenizer}
    assert names == {"r/models/reverse-text-3-12-seed7"}


def test_what_is_written_down_stays():
    run = resolve_run(
        run_of(
            "warm_start.directory = 'w'\ninference.model = 'a'\ntrainer.model = 'b'\n"
            "orchestrator.tokenizer = 'c'\ntrainer.weights_dir = 'd'\n"
            "inference.weights_dir = 'e'\ntrainer.output_dir = 'f'\n"
            "orchestrator.output_dir = 'g'\norchestrator.trainer_url = 'http://t'\n"
            "orchestrator.inference_urls = ['http://i']"
        )
    )
    assert (run.warm_start.directory, run.inference.model, run.trainer.model) == (Path("w"), "a", "b")
    assert (run.orchestrator.tokenizer, run.trainer.weights_dir, run.inference.weights_dir) == (
        "c",
        Path("d"),
        Path("e"),
    )
    assert (run.trainer.output_dir, run.orchestrator.output_dir) == (Path("f"), Path("g"))
    assert (run.orchestrator.trainer_url, run.orchestrator.inference_urls) == ("http://t", ["http://i"])


def test_models_directories_and_urls_by_default():
    run = resolve_run(run_of(MODEL + "name = 'x'\ninference.port = 1\ntrainer.port = 2\ntrainer.host = '::'"))
    assert (run.trainer.model, run.orchestrator.tokenizer) == ("m", "m")
    assert run.orchestrator.output_dir == Path("runs/x")
    assert run.trainer.output_dir == Path("runs/x/trainer")
    assert run.trainer.weights_dir == run.inference.weights_dir == Path("runs/x/weights")
    assert run.orchestrator.inference_urls == ["http://127.0.0.1:1"]
    assert run.orchestrator.trainer_url == "http://[::1]:2"


def test_the_trainers_model_serves_if_only_that_is_set():
    assert resolve_run(run_of("trainer.model = 'm'")).inference.model == "m"


def test_a_run_without_a_model_says_so_once():
    assert problem_of("") == "[inference] model: not set; name a directory, or give a run a [warm_start]"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("node7", "http://node7:9"),
    ],
)
def test_addresses_to_listen_on_become_urls(host, url):
    assert reachable(host, 9) == url


@pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")
def test_truncation_switches_capture_on():
    assert resolve_run(run_of(MODEL)).inference.enable_return_sampling_mask is False
    source = (
        "[[orchestrator.train.source]]\n[[orchestrator.train.source]]\nname = 'b'\nsampling.top_p = 0.9\n"
    )
    assert resolve_run(run_of(MODEL + source)).inference.enable_return_sampling_mask is True
    by_hand = MODEL + "inference.enable_return_sampling_mask = true"
    assert resolve_run(run_of(by_hand)).inference.enable_return_sampling_mask is True


def test_capture_switched_off_by_hand_under_truncation():
    off = MODEL + "inference.enable_return_sampling_mask = false\n"
    text = problem_of(off + "orchestrator.train.sampling.top_k = 9")
    assert (
        "[inference] enable_return_sampling_mask = false: but reverse-text truncates, and without masks"
        in text
    )
    assert "remove it, or set top_p = 1.0, top_k = -1, min_p = 0.0 and no masks in extra_body" in text
    assert resolve_run(run_of(off)).inference.enable_return_sampling_mask is False


def test_truncation_makes_engine_arguments_refused_that_break_capture():
    arguments = MODEL + "inference.vllm.worker_cls = 'a.B'\n"
    resolve_run(run_of(arguments))
    assert "worker_cls" in problem_of(arguments + "orchestrator.train.sampling.top_k = 9")


def test_source_names_differ():
    twice = "[[orchestrator.train.source]]\nname = 'a'\n[[orchestrator.train.source]]\nname = '{}'\n"
    text = problem_of(MODEL + twice.format("a"))
    assert text.startswith('[orchestrator.train.source[1]] name = "a": is the name of source[0] too')
    assert text.endswith("choose another")
    resolve_run(run_of(MODEL + twice.format("b")))


def test_rows_hold_the_longest_sequence():
    most = MODEL + "orchestrator.train.sampling.max_tokens = 100\ntrainer.row_tokens = {}"
    text = problem_of(most.format(100))
    assert text.startswith("[trainer] row_tokens = 100: is too few for a prompt and max_tokens = 100")
    assert text.endswith("(reverse-text); raise it or lower that")
    resolve_run(run_of(most.format(101)))
    context = MODEL + "inference.vllm.max_model_len = 100\ntrainer.row_tokens = {}"
    assert "row_tokens = 99: is too few for max_model_len = 100" in problem_of(context.format(99))
    resolve_run(run_of(context.format(100)))
    assert problem_of(context.format(99)).endswith("or set max_tokens, to at most 99 less the prompt")
    resolve_run(run_of(context.format(99) + "\norchestrator.train.sampling.max_tokens = 98"))


def test_the_context_has_room_for_a_prompt():
    both = MODEL + "inference.vllm.max_model_len = {}\norchestrator.train.sampling.max_tokens = 64"
    text = problem_of(both.format(64))
    assert "[inference.vllm] max_model_len = 64: leaves no room for a prompt beside max_tokens = 64" in text
    resolve_run(run_of(both.format(65)))


def test_ports_differ_on_one_host():
    same = MODEL + "inference.port = 5\norchestrator.port = {}\ninference.host = '0.0.0.0'"
    assert problem_of(same.format(5)) == "[orchestrator] port = 5: is [inference] port too; choose another"
    resolve_run(run_of(same.format(6)))
    resolve_run(run_of(MODEL + "inference.port = 0\ntrainer.port = 0"))


def test_the_api_key_reaches_the_orchestrator():
    run = resolve_run(run_of(MODEL + "inference.api_key = 'k'"))
    assert run.orchestrator.inference_api_key.get_secret_value() == "k"
    text = problem_of(MODEL + "inference.api_key = 'k'\norchestrator.inference_api_key = 'l'")
    assert text.startswith("[orchestrator] inference_api_key: differs from [inference] api_key")


@pytest.mark.filterwarnings("ignore::keptset_settings.SettingsWarning")
def test_a_resolved_run_resolves_to_itself():
    text = "[warm_start]\n[orchestrator.train.sampling]\ntop_p = 0.9\nextra_body.stop = 'a'\n"
    text += "[[orchestrator.train.source]]\nsampling.extra_body.ignore_eos = true\n"
    once = resolve_run(run_of(text))
    assert resolve_run(once) == once
    assert resolve_run(run_of(to_toml(once))) == once


def test_resolving_leaves_its_argument_alone():
    run = run_of(MODEL + "orchestrator.train.sampling.top_k = 9")
    before = run.model_copy(deep=True)
    resolve_run(run)
    assert run == before


def test_services_alone_say_what_they_need(refused):
    assert refused(load_service, "inference", []) == (
        "[inference] model: not set; name a directory, or give a run a [warm_start]\n"
    )
    assert refused(load_service, "trainer", ["--model", "m"]).splitlines() == [
        "[trainer] output_dir: not set; name the directory for the spool and the checkpoints",
        "[trainer] weights_dir: not set; name the directory for the published weights",
    ]
    assert refused(load_service, "orchestrator", []).splitlines() == [
        '[orchestrator] inference_urls: not set; name the servers, such as ["http://127.0.0.1:8000"]',
        '[orchestrator] trainer_url: not set; name the trainer, such as "http://127.0.0.1:8001"',
        "[orchestrator] tokenizer: not set; name the directory of the model's tokenizer",
        "[orchestrator] output_dir: not set; name the directory for metrics.jsonl",
    ]


def test_services_alone_with_what_they_need():
    resolve_trainer(TrainerSettings(model="m", output_dir="o", weights_dir="w"))
    settings = OrchestratorSettings(
        inference_urls=["http://i"],
        trainer_url="http://t",
        tokenizer="m",
        output_dir="o",
        train={"sampling": {"top_k": 9}},
    )
    assert resolve_orchestrator(settings).train.source[0].sampling.top_k == 9
    settings.train.sampling.temperature = 0.0
    with pytest.raises(SettingsError, match="is greedy"):
        resolve_orchestrator(settings)


def test_the_three_services_take_their_way_of_weights_from_the_run():
    for chosen in ("files", "nccl"):
        run = resolve_run(run_of(MODEL + f"weights.transfer = '{chosen}'"))
        services = (run.inference, run.trainer, run.orchestrator)
        assert [service.weights_transfer for service in services] == [chosen] * 3


def test_weights_from_gpu_to_gpu_need_a_gpu_and_all_three_services():
    said = problem_of(MODEL + "weights.transfer = 'nccl'\ntrainer.device = 'cpu'")
    assert '[weights] transfer = "nccl": sends from a GPU' in said
    assert 'set weights.transfer = "files"' in said
    said = problem_of(MODEL + "weights.transfer = 'nccl'\norchestrator.weights_transfer = 'files'")
    assert "[orchestrator] weights_transfer" in said
    assert "differs from weights.transfer = 'nccl'; leave it out" in said


COLOCATED = MODEL + "colocated = true\n"


def test_one_setting_makes_engine_and_trainer_take_turns_on_a_gpu():
    run = resolve_run(run_of(COLOCATED + "name = 'x'"))
    assert run.inference.gpu_lock == run.trainer.gpu_lock == Path("runs/x/gpu.lock")
    assert run.orchestrator.colocated
    assert run.orchestrator.start_patience > resolve_run(run_of(MODEL)).orchestrator.start_patience
    own = resolve_run(run_of(COLOCATED + "inference.gpu_lock = '/shared/turn'"))
    assert own.trainer.gpu_lock == Path("/shared/turn")
    apart = resolve_run(run_of(MODEL))
    assert (apart.inference.gpu_lock, apart.trainer.gpu_lock, apart.orchestrator.colocated) == (
        None,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "orchestrator.max_async_level = 1",
            "[orchestrator] max_async_level = 1: asks for",
        ),
        ("weights.transfer = 'nccl'", "NCCL takes no two processes on one GPU"),
        (
            "inference.vllm.enable_sleep_mode = false",
            "[inference.vllm] enable_sleep_mode = false",
        ),
        ("trainer.cuda_graphs = 'on'", '[trainer] cuda_graphs = "on": does not go with colocated'),
        ("inference.gpu_lock = 'a'\ntrainer.gpu_lock = 'b'", '[trainer] gpu_lock = "b": is not inference'),
    ],
)
def test_what_does_not_go_with_one_gpu_for_both_is_refused(setting, said):
    assert said in problem_of(COLOCATED + setting)


@pytest.mark.parametrize(
    "setting", ["inference.gpu_lock = 'a'", "trainer.gpu_lock = 'a'", "orchestrator.colocated = true"]
)
def test_one_service_alone_takes_no_turns(setting):
    assert "set colocated = true for the run" in problem_of(MODEL + setting)


EXTERNAL = MODEL + "trainer.ranks = 'external'\n"


@pytest.mark.parametrize(
    ("setting", "said", "way_out"),
    [
        ("colocated = true", "does not go with colocated", "trainer.ranks = 2\ncolocated = true"),
        ("weights.transfer = 'nccl'", 'does not go with weights.transfer = "nccl"', "weights = {}"),
    ],
)
def test_what_needs_the_ranks_beside_their_ingest_is_refused_to_external_ones(setting, said, way_out):
    assert f'[trainer] ranks = "external": {said}' in problem_of(EXTERNAL + setting)
    resolve_run(run_of(EXTERNAL))
    resolve_run(run_of((MODEL if "ranks" in way_out else EXTERNAL) + way_out))
    alone = {"model": "m", "output_dir": "o", "weights_dir": "w", "ranks": "external", "gpu_lock": "l"}
    with pytest.raises(SettingsError, match="does not go with colocated"):
        resolve_trainer(TrainerSettings.model_validate(alone))


def test_services_that_are_started_alone_keep_the_rules_of_colocated():
    trainer = {"model": "m", "output_dir": "o", "weights_dir": "w", "gpu_lock": "l", "cuda_graphs": "on"}
    with pytest.raises(SettingsError, match="cuda_graphs"):
        resolve_trainer(TrainerSettings.model_validate(trainer))
    orchestrator = OrchestratorSettings.model_validate(
        {
            "inference_urls": ["http://i"],
            "trainer_url": "http://t",
            "tokenizer": "m",
            "output_dir": "o",
            "colocated": True,
            "weights_transfer": "nccl",
            "max_async_level": 2,
        }
    )
    with pytest.raises(SettingsError, match=r"(?s)max_async_level.*weights_transfer"):
        resolve_orchestrator(orchestrator)


def test_router_of_the_policy_is_none_of_its_servers_and_no_frozen_generator():
    router = f"{MODEL}orchestrator.router_url = 'http://127.0.0.1:9000'\n"
    frozen = (
        "[[orchestrator.train.source]]\nname = 'b'\n[orchestrator.train.source.generator]\n"
        "kind = 'frozen'\nurl = 'http://localhost:9000/v1'\nmodel = 'm'\n"
    )
    said = problem_of(router + frozen)
    assert (
        "is one of orchestrator.inference_urls or their router, so b would be sampled by the policy" in said
    )
    said = problem_of(f"{MODEL}orchestrator.router_url = 'http://localhost:8000'\n")
    assert said.startswith('[orchestrator] router_url = "http://localhost:8000": is one of orchestrator.inf')
    assert resolve_run(run_of(router)).orchestrator.router_url == "http://127.0.0.1:9000"
