"""Secrets are never printed or written; they travel by environment."""

import pytest
from pydantic import ValidationError

from keptset_settings import (
    RunSettings,
    SettingsError,
    load_run,
    load_service,
    read_run,
    service_environment,
    to_toml,
    write_service_configs,
)

SECRET = "s3cr3t-nobody-may-see"


@pytest.fixture
def run(monkeypatch) -> RunSettings:
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY", SECRET)
    return read_run([], ["--inference.model", "m"])


def test_neither_repr_nor_text_nor_json(run):
    assert run.inference.api_key.get_secret_value() == SECRET
    assert SECRET not in repr(run) + str(run) + run.model_dump_json() + repr(run.inference) + str(
        run.orchestrator
    )


def test_neither_toml_nor_written_files(run, tmp_path):
    texts = [to_toml(run), *(path.read_text() for path in write_service_configs(run, tmp_path))]
    assert SECRET not in "".join(texts)
    assert "# inference.api_key is set but never written; give it as KEPTSET_INFERENCE__API_KEY" in texts[0]
    assert texts[1].startswith("# inference.api_key is set")
    assert texts[2].startswith("# orchestrator.inference_api_key is set")
    assert not texts[3].startswith("#")


def test_service_environment_carries_them(run, tmp_path, monkeypatch):
    inference, orchestrator, _ = write_service_configs(run, tmp_path)
    assert service_environment(run, "inference") == {"KEPTSET_INFERENCE__API_KEY": SECRET}
    assert service_environment(run, "trainer") == {}
    monkeypatch.delenv("KEPTSET_INFERENCE__API_KEY")
    for service, path in (("inference", inference), ("orchestrator", orchestrator)):
        assert load_service(service, ["--config", str(path)]) != getattr(run, service)
        for name, text in service_environment(run, service).items():
            monkeypatch.setenv(name, text)
        assert load_service(service, ["--config", str(path)]) == getattr(run, service)


@pytest.mark.parametrize(
    "arguments", [["--dry-run"], ["--help"], ["--dry-run", "--inference.api-key", SECRET]]
)
def test_not_what_commands_print(arguments, run, capsys):
    with pytest.raises(SystemExit) as exit_:
        load_run(["--inference.model", "m", *arguments])
    assert exit_.value.code == 0
    printed = capsys.readouterr()
    assert printed.out
    assert SECRET not in printed.out + printed.err


@pytest.mark.parametrize(
    "content",
    [
        f"inference.api_key = ['{SECRET}']",
        f"inference.api_key = {{a = '{SECRET}'}}",
        f"orchestrator.inference_api_key = [{{a = '{SECRET}'}}]",
        f"inference = [{{api_key = '{SECRET}'}}]",
        f"inference.api_key = '{SECRET}'\ninference.port = -1",
        f"inference.api_kye = '{SECRET}'",
        f"inference.api_key = '{SECRET}'\norchestrator.inference_api_key = 'other'",
        f"inference.vllm = {{api_key = '{SECRET}', hf_token = '{SECRET}', api-key = '{SECRET}'}}",
        f"orchestrator.trainer_url = 'http://user:{SECRET}@host'",
        f"orchestrator.inference_urls = ['http://user:{SECRET}@host']",
    ],
)
def test_not_in_errors(content, toml):
    with pytest.raises(SettingsError) as error:
        read_run([toml(content)])
    assert SECRET not in str(error.value)
    assert str(error.value)


def test_not_in_the_error_of_a_variable_that_is_not_json(monkeypatch, refused):
    monkeypatch.setenv("KEPTSET_INFERENCE", f'{{"api_key": "{SECRET}"')
    text = refused(load_run, [])
    assert "inference: must be JSON: " in text
    assert SECRET not in text


def test_not_in_pydantics_own_errors():
    with pytest.raises(ValidationError) as error:
        RunSettings.model_validate({"inference": {"api_key": [SECRET]}})
    assert SECRET not in str(error.value)
