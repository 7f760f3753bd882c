"""What the compose files promise, read from the files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from keptset.grace import seconds_to_end
from keptset_settings import load_service, read_run

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


def settings_of(service: str, environment: dict[str, str], tmp_path: Path, monkeypatch) -> Any:
    """What a service takes of the demo's file and of its container's environment."""
    (tmp_path / "secret").write_text("secret")
    for name, text in environment.items():
        if name.startswith("KEPTSET_"):
            value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
            monkeypatch.setenv(name, str(tmp_path / "secret") if name.endswith("_FILE") else value)
    return load_service(service, ["--config", str(ROOT / "deploy" / "local" / "reverse-text.toml")])


@pytest.mark.parametrize("service", ["inference", "trainer", "orchestrator"])
def test_settings_are_those_that_the_services_take(service, tmp_path, monkeypatch):
    environment = PROJECT["services"][service]["environment"]
    settings = settings_of(service, environment, tmp_path, monkeypatch)
    assert settings.internal_token.get_secret_value() == "secret"
    expected = {
        "inference": {"model": "/var/lib/keptset/models/warm-start", "port": 8000, "weights_dir": "weights"},
        "trainer": {"model": "/var/lib/keptset/models/warm-start", "port": 8001, "output_dir": "trainer"},
        "orchestrator": {"trainer_url": "http://trainer:8001", "port": 8002, "output_dir": "runs/run"},
    }
    for name, value in expected[service].items():
        place = Path("/var/lib/keptset") / str(value) if name.endswith("_dir") else value
        assert getattr(settings, name) == place


@pytest.mark.parametrize("service", ["inference", "trainer", "orchestrator"])
def test_services_have_as_long_to_end_as_they_take_by_their_own_settings(service):
    """Those of the demo; whoever changes them may change the time too, as compose cannot follow a setting."""
    run = read_run([ROOT / "deploy" / "local" / "reverse-text.toml"])
    grace = f"{seconds_to_end(service, run):g}s"
    said = PROJECT["services"][service]["stop_grace_period"]
    if service != "orchestrator":
        variable = f"KEPTSET_{service.upper()}_STOP_GRACE"
        assert said == f"${{{variable}:-{grace}}}"
        assert f"# {variable}={grace} " in (ROOT / "deploy" / "docker" / "env.example").read_text()
    else:
        assert said == grace


@pytest.mark.parametrize("service", ["inference", "trainer", "orchestrator"])
def test_colocated_services_mean_the_same_lock_on_a_volume_of_both(service, tmp_path, monkeypatch):
    override = yaml.safe_load((ROOT / "deploy" / "compose.colocated.yml").read_text())
    own = override["services"][service]
    environment = PROJECT["services"][service]["environment"] | own["environment"]
    settings = settings_of(service, environment, tmp_path, monkeypatch)
    if service == "orchestrator":
        assert settings.colocated
        return
    assert settings.gpu_lock == Path("/var/lib/keptset/gpu/lock")
    assert own["volumes"] == [f"gpu:{settings.gpu_lock.parent}"]
    assert "gpu" in override["volumes"]
    dockerfile = (ROOT / "deploy" / "docker" / f"{service}.Dockerfile").read_text()
    (made,) = re.findall(r"for name in (.*); do", dockerfile)
    assert settings.gpu_lock.parent.name in made.split(), "a new volume has the owner of the image's folder"


def test_colocated_services_differ_from_those_on_two_gpus_in_turns_and_device_alone():
    """The files stand side by side: one over the other would give the trainer both devices."""
    apart, together = services("compose.gpu.yml"), services("compose.colocated.yml")
    turns = together.pop("orchestrator")["environment"]
    assert turns["KEPTSET_COLOCATED"] == "true"
    for name in ("inference", "trainer"):
        one, other = apart[name], together[name]
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        device["device_ids"] = ["${KEPTSET_GPU:-0}"]
        one["environment"] = turns | one["environment"]
        assert other.pop("healthcheck") == {"start_period": "30m"}, "as long as Kubernetes gives it to start"
        assert other.pop("volumes")
    assert together == apart


def test_the_colocated_orchestrator_starts_before_whoever_waits_for_the_gpu_is_healthy():
    """A trainer that comes back waits for an engine that was left awake; an orchestrator has it sleep."""
    waits_for = services("compose.colocated.yml")["orchestrator"]["depends_on"]
    assert waits_for.keys() == PROJECT["services"]["orchestrator"]["depends_on"].keys()
    assert {one["condition"] for one in waits_for.values()} == {"service_started"}
