"""The images and the compose project, really run."""

import threading
import time

import docker
import docker.errors
import httpx
import pytest

from .compose_project import Project, kill
from .conftest import STEPS

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

LONG_LIVED = ("inference", "trainer", "orchestrator")


def run_in(engine, image: str, *command: str) -> str:
    """Output of a command in an image, without network."""
    client, _, _ = engine
    entry, *arguments = command
    output = client.containers.run(
        image, arguments, entrypoint=entry, network_mode="none", read_only=True, remove=True, stderr=True
    )
    return output.decode()


def fails_in(engine, image: str, *command: str) -> str:
    with pytest.raises(docker.errors.ContainerError) as error:
        run_in(engine, image, *command)
    return error.value.stderr.decode()


@pytest.mark.parametrize("service", LONG_LIVED)
def test_image_is_what_it_says(engine, images, service):
    config = engine[0].images.get(images[service].tag).attrs["Config"]
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.title"] == f"keptset-{service}"
    assert not [line for line in config["Env"] if line.startswith("PIP_") and "CERT" not in line]
    assert f"usage: keptset-{service}" in run_in(engine, images[service].tag, f"keptset-{service}", "--help")


@pytest.mark.parametrize("service", LONG_LIVED)
def test_image_has_no_build_tools(engine, images, service):
    found = run_in(
        engine, images[service].tag, "sh", "-c", "ls /opt/keptset/bin; command -v cc gcc make; true"
    )
    assert not {"pip", "hatchling", "cc", "gcc", "make", "uv"} & {
        line.rpartition("/")[2] for line in found.split()
    }


def test_orchestrator_is_small(engine, images):
    assert images["orchestrator"].megabytes <= 150
    for module in ("torch", "vllm", "transformers"):
        text = fails_in(engine, images["orchestrator"].tag, "python", "-c", f"import {module}")
        assert "ModuleNotFoundError" in text


def test_run_ends_although_a_container_is_killed(project: Project, report):
    began = time.monotonic()
    project.wait_until(project.rows, 180, "the first step")
    first = time.monotonic() - began
    before = project.container("trainer")
    kill(before)
    killed = time.monotonic()
    project.wait_until(
        lambda: (
            project.container("trainer").attrs["State"]["StartedAt"] != before.attrs["State"]["StartedAt"]
            and project.health("trainer") == "healthy"
        ),
        180,
        "the trainer to come back",
    )
    back = time.monotonic() - killed
    orchestrator = project.container("orchestrator")
    project.wait_until(lambda: project.health("orchestrator") == "exited", 240, "the end of the run")
    report.append(
        f"first step {first:.0f} s after that, trainer killed and back in {back:.0f} s, "
        f"run ended after {time.monotonic() - began:.0f} s"
    )
    assert project.container("orchestrator").attrs["State"]["ExitCode"] == 0, project.logs()
    assert project.container("trainer").attrs["RestartCount"] == 1
    rows = project.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), orchestrator.logs().decode()
    for row in rows:
        assert row["kept/coverage"] == 1
        assert row["mismatch_kl/mean"] <= 1e-7
        assert row["weight_version"] == row["step"]
        assert 0 < row["reward/mean"] < 1


@pytest.mark.parametrize("service", LONG_LIVED)
def test_container_is_confined(project: Project, service):
    host = project.container(service).attrs["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert any("no-new-privileges" in option for option in host["SecurityOpt"])
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0
    bound = [place["HostIp"] for places in (host["PortBindings"] or {}).values() for place in places]
    assert set(bound) <= {"127.0.0.1"}
    assert bool(bound) == (service != "trainer")


def test_secrets_open_the_routes_and_are_seen_nowhere(project: Project):
    key = project.read("inference", "/var/lib/keptset/secrets/api-key")
    token = project.read("inference", "/var/lib/keptset/secrets/internal-token")
    url = f"http://127.0.0.1:{project.settings['KEPTSET_INFERENCE_PORT']}"
    sampling = {"top_p": 0.97, "top_k": 512, "max_tokens": 4, "logprobs": 0}
    body = {"token_ids": [3, 97, 98, 99], "sampling_params": sampling}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:

        def status(method: str, path: str, secret: str = "", **content: object) -> int:
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            return client.request(method, path, headers=headers, **content).status_code

        assert status("GET", "/health") == 200
        assert status("POST", "/inference/v1/generate", json=body) == 401
        assert status("POST", "/inference/v1/generate", token, json=body) == 401
        assert status("GET", "/metrics", key) == 401
        assert status("GET", "/metrics", token) == 200
        assert status("POST", "/keptset/v1/weights", key, json={"version": STEPS}) == 401
        assert status("POST", "/keptset/v1/weights", token, json={"version": STEPS}) == 200
        shown = {"Authorization": f"Bearer {key}"}
        answer = client.post("/inference/v1/generate", headers=shown, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["kept_tokens"]["counts"]
    for service in ("secrets", "warm-start", *LONG_LIVED):
        container = project.container(service)
        seen = container.logs().decode(errors="replace") + str(container.attrs)
        assert key not in seen, service
        assert token not in seen, service


def test_asked_to_stop_a_server_ends_its_requests_first(project: Project):
    key = project.read("inference", "/var/lib/keptset/secrets/api-key")
    url = f"http://127.0.0.1:{project.settings['KEPTSET_INFERENCE_PORT']}/inference/v1/generate"
    sampling = {"max_tokens": 100, "min_tokens": 100, "n": 8, "seed": 1}
    body = {"token_ids": [3, 97, 98, 99], "sampling_params": sampling, "kept_tokens": False}
    answers: list[httpx.Response] = []

    def ask() -> None:
        shown = {"Authorization": f"Bearer {key}"}
        answers.append(httpx.post(url, headers=shown, json=body, timeout=60, trust_env=False))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    project.container("inference").stop(timeout=45)
    asking.join(60)
    assert [answer.status_code for answer in answers] == [200]
    assert all(len(choice["token_ids"]) == 100 for choice in answers[0].json()["choices"])
    assert project.container("inference").attrs["State"]["ExitCode"] == 0
    project.container("trainer").stop(timeout=75)
    assert project.container("trainer").attrs["State"]["ExitCode"] == 0


@pytest.mark.parametrize(
    "override", [(), ("gpu",), ("monitoring",), ("secrets",), ("gpu", "monitoring", "secrets")]
)
def test_overrides_fit_the_project(engine, override):
    client, tools, socket = engine
    files = [f"deploy/compose.{name}.yml" for name in override]
    merged = Project(client, tools, socket).compose("config", files=files)
    assert "keptset-inference" in merged
