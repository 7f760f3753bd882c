"""What the compose files promise, read from the files."""

import re
from pathlib import Path

import pytest
import yaml

from keptset_settings import load_service

ROOT = Path(__file__).parents[3]
PROJECT = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OVERRIDES = sorted(path.name for path in (ROOT / "deploy").glob("compose.*.yml"))


def services(name: str) -> dict:
    return yaml.safe_load((ROOT / "deploy" / name).read_text())["services"]


@pytest.mark.parametrize("service", PROJECT["services"])
def test_every_container_is_confined(service):
    content = PROJECT["services"][service]
    assert content["read_only"] is True
    assert content["cap_drop"] == ["ALL"]
    assert content["security_opt"] == ["no-new-privileges:true"]
    assert content["mem_limit"]
    assert content["restart"]


@pytest.mark.parametrize("file", ["", *OVERRIDES])
def test_ports_are_this_machines_only(file):
    content = services(file) if file else PROJECT["services"]
    ports = [port for service in content.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not [name for name, service in content.items() if service.get("network_mode") == "host"]


def test_only_the_inference_server_and_the_orchestrator_can_be_reached():
    assert PROJECT["networks"]["private"] == {"internal": True}
    published = [name for name, service in PROJECT["services"].items() if "ports" in service]
    assert sorted(published) == ["inference", "orchestrator"]
    assert PROJECT["services"]["trainer"]["networks"] == ["private"]


def test_secrets_come_from_files():
    for file in ("", *OVERRIDES):
        content = services(file) if file else PROJECT["services"]
        for service in content.values():
            for name in service.get("environment", {}):
                if "KEY" in name or "TOKEN" in name or "PASSWORD" in name:
                    assert name.endswith("_FILE")


def test_inference_cannot_write_weights():
    volumes = PROJECT["services"]["inference"]["volumes"]
    assert [volume for volume in volumes if volume.startswith("weights:")] == [
        "weights:/var/lib/keptset/weights:ro"
    ]


@pytest.mark.parametrize("service", ["inference", "trainer", "orchestrator"])
def test_dockerfiles_start_from_one_pinned_base(service):
    text = (ROOT / "deploy" / "docker" / f"{service}.Dockerfile").read_text()
    base = PROJECT["x-build"]["BASE"].removeprefix("${KEPTSET_BASE:-").removesuffix("}")
    assert f"ARG BASE={base}\n" in text
    assert text.count("FROM ") == 2
    assert text.rindex("USER 10001:10001") > text.rindex("FROM ")
    assert "latest" not in text


@pytest.mark.parametrize("service", ["inference", "trainer", "orchestrator"])
def test_settings_are_those_that_the_services_take(service, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    for name, text in PROJECT["services"][service]["environment"].items():
        if name.startswith("KEPTSET_"):
            value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
            monkeypatch.setenv(name, str(tmp_path / "secret") if name.endswith("_FILE") else value)
    settings = load_service(service, ["--config", str(ROOT / "deploy" / "local" / "reverse-text.toml")])
    assert settings.internal_token.get_secret_value() == "secret"
    expected = {
        "inference": {"model": "/var/lib/keptset/models/warm-start", "port": 8000, "weights_dir": "weights"},
        "trainer": {"model": "/var/lib/keptset/models/warm-start", "port": 8001, "output_dir": "trainer"},
        "orchestrator": {"trainer_url": "http://trainer:8001", "port": 8002, "output_dir": "runs/run"},
    }
    for name, value in expected[service].items():
        place = Path("/var/lib/keptset") / str(value) if name.endswith("_dir") else value
        assert getattr(settings, name) == place
