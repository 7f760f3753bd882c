"""Secrets from files, which is how containers get them."""

import pytest

from keptset_settings import SettingsError, load_service, read_run, service_environment, to_toml

SECRET = "s3cr3t-nobody-may-see"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    return path


def test_a_file_holds_the_secret(monkeypatch, secret_file):
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY_FILE", str(secret_file))
    run = read_run([], ["--inference.model", "m"])
    assert run.inference.api_key.get_secret_value() == SECRET
    assert run.orchestrator.inference_api_key == run.inference.api_key
    assert SECRET not in to_toml(run) + repr(run)


def test_a_service_alone_reads_its_own(monkeypatch, secret_file):
    monkeypatch.setenv("KEPTSET_TRAINER__INTERNAL_TOKEN_FILE", str(secret_file))
    arguments = ["--model", "m", "--output_dir", "o", "--weights_dir", "w"]
    assert load_service("trainer", arguments).internal_token.get_secret_value() == SECRET
    assert load_service("inference", ["--model", "m"]).internal_token is None


def test_empty_means_not_set(monkeypatch):
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY_FILE", "")
    assert load_service("inference", ["--model", "m"]).api_key is None


def test_only_secrets_come_in_files(monkeypatch, secret_file):
    monkeypatch.setenv("KEPTSET_INFERENCE__MODEL_FILE", str(secret_file))
    with pytest.raises(SettingsError, match="model_file: unknown key"):
        read_run([], ["--inference.model", "m"])


def test_both_ways_at_once_are_refused(monkeypatch, secret_file):
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY_FILE", str(secret_file))
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY", "other")
    with pytest.raises(SettingsError, match="KEPTSET_INFERENCE__API_KEY is set too") as error:
        read_run([], ["--inference.model", "m"])
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(("content", "what"), [(None, "No such file"), (b"\n", "empty"), (b"\xff", "UTF-8")])
def test_a_file_without_a_secret_is_an_error(monkeypatch, tmp_path, content, what):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("KEPTSET_INFERENCE__API_KEY_FILE", str(path))
    with pytest.raises(SettingsError, match=what) as error:
        read_run([], ["--inference.model", "m"])
    assert "KEPTSET_INFERENCE__API_KEY_FILE" in str(error.value)


def test_services_of_a_run_share_one_token(monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__INTERNAL_TOKEN", SECRET)
    run = read_run([], ["--inference.model", "m"])
    for service in ("inference", "trainer", "orchestrator"):
        assert SECRET in service_environment(run, service).values()


def test_two_tokens_in_one_run_are_refused(monkeypatch):
    monkeypatch.setenv("KEPTSET_TRAINER__INTERNAL_TOKEN", SECRET)
    monkeypatch.setenv("KEPTSET_ORCHESTRATOR__INTERNAL_TOKEN", "other")
    with pytest.raises(
        SettingsError, match=r"\[orchestrator\] internal_token: differs from \[trainer\]"
    ) as error:
        read_run([], ["--inference.model", "m"])
    assert SECRET not in str(error.value)
