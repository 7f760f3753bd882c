"""Options > environment > later files > earlier files > defaults, each in all its spellings."""

import pytest

from keptset_settings import SettingsError, SettingsWarning, load_run, load_service, read_run

MODEL = "[inference]\nmodel = 'm'\n"
PLACES = ["--output-dir", "trainer", "--weights-dir", "weights"]


def test_defaults_when_nothing_is_said(toml):
    assert load_service("inference", ["--config", str(toml(MODEL))]).port == 8000


def test_each_source_wins_over_the_next(toml, monkeypatch):
    first = toml(MODEL + "port = 1001\nhost = 'a'\nload_timeout = 1\ncapture = 'v1'", "a.toml")
    second = toml("[inference]\nport = 1002\nhost = 'b'\nload_timeout = 2", "b.toml")
    monkeypatch.setenv("KEPTSET_INFERENCE__PORT", "1003")
    monkeypatch.setenv("KEPTSET_INFERENCE__HOST", "c")
    settings = load_service("inference", ["--config", str(first), f"--config={second}", "--port", "1004"])
    assert (settings.port, settings.host, settings.load_timeout, settings.capture) == (1004, "c", 2.0, "v1")


def test_tables_merge_and_lists_do_not(toml, monkeypatch):
    path = toml(MODEL + "vllm = {dtype = 'float32', hf_overrides = {a = 1, b = [1, 2]}}")
    monkeypatch.setenv("KEPTSET_INFERENCE__VLLM", '{"max_model_len": 64}')
    settings = load_service("inference", ["--config", str(path), "--vllm.hf_overrides.b", "[3]"])
    expected = {"dtype": "float32", "hf_overrides": {"a": 1, "b": [3]}, "max_model_len": 64}
    assert settings.vllm == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-return-sampling-mask", "true", "--load-timeout", "5"],
        ["--enable_return_sampling_mask=true", "--load_timeout=5"],
        ["--enable-return-sampling-mask", "--load-timeout=5"],
        ["--load_timeout", "5", "--enable_return_sampling_mask"],
    ],
)
def test_spellings_of_options(arguments):
    settings = load_service("inference", ["--model", "m", *arguments])
    assert settings.enable_return_sampling_mask is True
    assert settings.load_timeout == 5.0


def test_a_negative_number_is_a_value_and_an_equals_sign_may_be_part_of_one(toml):
    run = read_run([], ["--inference.model", "a=b", "--orchestrator.train.sampling.top-k", "-1"])
    assert run.inference.model == "a=b"
    assert run.orchestrator.train.source[0].sampling.top_k == -1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("float32", "float32"),
        ("512", 512),
        ("0.5", 0.5),
        ("true", True),
        ('"true"', "true"),
        ("[1, 2]", [1, 2]),
        ('{"head_dtype": "float32"}', {"head_dtype": "float32"}),
        ("{head_dtype = 'float32'}", {"head_dtype": "float32"}),
        ("2024-01-01", "2024-01-01"),
        ("a\nb = 2", "a\nb = 2"),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_values_of_engine_arguments_are_parsed(text, value, monkeypatch):
    assert load_service("inference", ["--model", "m", "--vllm.seed", text]).vllm == {"seed": value}
    assert load_service("inference", ["--model", "m", f"--vllm.seed={text}"]).vllm == {"seed": value}
    monkeypatch.setenv("KEPTSET_INFERENCE__VLLM__SEED", text)
    assert load_service("inference", ["--model", "m"]).vllm == {"seed": value}


def test_engine_arguments_may_be_spelled_with_dashes_as_options():
    assert load_service("inference", ["--model", "m", "--vllm.max-model-len", "64"]).vllm == {
        "max_model_len": 64
    }


def test_nested_variables_lists_and_kinds(monkeypatch):
    monkeypatch.setenv("KEPTSET_INFERENCE__MODEL", "m")
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__TRAIN__SAMPLING__TOP_P", "0.97")
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__TRAIN__SAMPLING__TOP_K", "50")
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__TRAIN__SAMPLING__EXTRA_BODY__MIN_TOKENS", "3")
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__TRAIN__SOURCE", '[{"name": "a"}, {"name": "b", "ratio": 2}]')
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__INFERENCE_URLS", '["http://a:1", "http://b:2/"]')
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__KIND", "sequence_product")
    monkeypatch.setenv("keptset_trainer__loss__low", "0.25")
    monkeypatch.setenv("KEPTSET_TRAINER__OPTIMIZER__BETAS", "[0.5, 0.75]")
    monkeypatch.setenv("KEPTSET_TRAINER__ENTROPY", "off")
    run = load_run([])
    assert [(s.name, s.sampling.top_p, s.sampling.top_k) for s in run.orchestrator.train.source] == [
        ("a", 0.97, 50),
        ("b", 0.97, 50),
    ]
    assert run.orchestrator.train.source[1].sampling.extra_body == {"min_tokens": 3}
    assert run.orchestrator.inference_urls == ["http://a:1", "http://b:2"]
    assert (run.trainer.loss.kind, run.trainer.loss.low) == ("sequence_product", 0.25)
    assert run.trainer.optimizer.betas == (0.5, 0.75)
    assert run.trainer.entropy is None


def test_an_empty_variable_is_not_set(monkeypatch):
    monkeypatch.setenv("KEPTSET_INFERENCE__PORT", "")
    assert load_service("inference", ["--model", "m"]).port == 8000


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_not_ours(monkeypatch):
    for name, text in {
        "KEPTSET_INFERENCE_SERVICE_HOST": "10.0.0.1",
        "KEPTSET_INFERENCE_SERVICE_PORT": "8000",
        "KEPTSET_INFERENCE_SERVICE_PORT_HTTP": "8000",
        "KEPTSET_INFERENCE_PORT": "tcp://10.0.0.1:8000",
        "KEPTSET_INFERENCE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KEPTSET_INFERENCE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, text)
    assert load_service("inference", ["--model", "m"]).port == 8000


def test_one_underscore_too_few_is_not_taken_for_a_service_link(monkeypatch, refused):
    monkeypatch.setenv("KEPTSET_INFERENCE_PORT", "9000")
    assert "inference_port: unknown key, did you mean inference?" in refused(
        load_service, "inference", ["--model", "m"]
    )


def test_a_service_ignores_valid_values_for_others(monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__LOW", "0.5")  # its kind is in the trainer's file
    assert load_service("inference", ["--model", "m"]).model == "m"


def test_a_run_starts_one_service_with_what_the_run_resolves(toml):
    path = toml("name = 'x'\n[inference]\nmodel = 'm'\n[orchestrator.train.sampling]\ntop_p = 0.9\ntop_k = 9")
    assert load_service("inference", ["--config", str(path)]).enable_return_sampling_mask is True
    assert str(load_service("trainer", ["--config", str(path)]).weights_dir) == "runs/x/weights"
    orchestrator = load_service("orchestrator", ["--config", str(path), "--steps", "3"])
    assert orchestrator.trainer_url == "http://127.0.0.1:8001"
    assert orchestrator.steps == 3


def test_a_table_alone_is_not_resolved_as_a_run(toml):
    path = toml("[inference]\nmodel = 'm'")
    assert load_service("inference", ["--config", str(path)]).weights_dir is None


def test_arguments_of_the_process_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["keptset-inference", "--model", "m", "--port", "7"])
    assert load_service("inference").port == 7


LOSS = "[trainer.loss]\nkind = 'geometric_mean'\nlow = 0.99\nhigh = 1.01\n"


def test_another_kind_starts_the_table_anew_and_says_what_it_leaves_out(toml):
    path = toml(MODEL + LOSS)
    with pytest.warns(SettingsWarning) as told:
        run = read_run([path], ["--trainer.loss.kind", "clipped_ratio"])
    assert (run.trainer.loss.kind, run.trainer.loss.clip_low) == ("clipped_ratio", 0.2)
    assert str(told[0].message) == (
        '[trainer.loss] kind = "clipped_ratio": takes the place of geometric_mean, so what was said of that '
        f"kind is left out: low (from {path}), high (from {path}); say again, beside the kind, what shall "
        "hold for this one (from --trainer.loss.kind)"
    )


def test_bounds_of_one_kind_are_never_those_of_another(toml, monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__KIND", "sequence_product")
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__HIGH", "3")
    with pytest.warns(SettingsWarning, match="takes the place of geometric_mean"):
        loss = read_run([toml(MODEL + LOSS)]).trainer.loss
    assert (loss.low, loss.high) == (0.5, 3.0)


@pytest.mark.filterwarnings("error::keptset_settings.SettingsWarning")
def test_the_same_kind_keeps_what_was_said_of_it(toml):
    loss = read_run([toml(MODEL + LOSS)], ["--trainer.loss.kind", "geometric_mean"]).trainer.loss
    assert (loss.low, loss.high) == (0.99, 1.01)


def test_a_kind_of_a_later_file_and_one_of_the_command_line(toml):
    first, second = toml(MODEL + LOSS, "a.toml"), toml("[trainer.loss]\nkind = 'truncated_weight'", "b.toml")
    with pytest.warns(SettingsWarning, match=r"place of geometric_mean.*low \(from .*a.toml"):
        assert read_run([first, second]).trainer.loss.max_weight == 2.0
    with pytest.warns(SettingsWarning, match="place of geometric_mean"):
        assert read_run([first, second], ["--trainer.loss.kind", "geometric_mean"]).trainer.loss.low == 0.99


def test_a_key_that_comes_later_than_its_kind_is_still_refused(toml, monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__LOSS__KIND", "clipped_ratio")
    with pytest.raises(SettingsError, match="low: unknown key of kind clipped_ratio"):
        read_run([toml(MODEL)], ["--trainer.loss.low", "0.5"])


def test_a_kind_that_does_not_exist_leaves_the_others_keys_alone(toml):
    with pytest.raises(SettingsError) as error:
        read_run([toml(MODEL + LOSS)], ["--trainer.loss.kind", "clipped_rati"])
    assert str(error.value).startswith(
        '[trainer.loss] kind = "clipped_rati": unknown kind, did you mean clipped_ratio?'
    )


def test_the_time_to_stop_of_a_run_is_its_trainers_from_file_environment_or_option(toml, monkeypatch):
    path = toml(f"{MODEL}[trainer]\nshutdown_timeout = 300\n")
    assert read_run([path]).trainer.shutdown_timeout == 300.0
    assert load_service("trainer", ["--config", str(path), *PLACES]).shutdown_timeout == 300.0
    monkeypatch.setenv("KEPTSET_TRAINER__SHUTDOWN_TIMEOUT", "200.5")
    assert load_service("trainer", ["--config", str(path), *PLACES]).shutdown_timeout == 200.5
    option = ["--trainer.shutdown-timeout", "100"]
    assert read_run([path], option).trainer.shutdown_timeout == 100.0


@pytest.mark.parametrize("value", ["0", "-1", "86401", "inf", "nan", "soon"])
def test_a_time_to_stop_that_is_none_is_named(toml, value):
    path = toml(MODEL)
    with pytest.raises(SettingsError, match=rf"shutdown_timeout.*{value}"):
        read_run([path], [f"--trainer.shutdown_timeout={value}"])
