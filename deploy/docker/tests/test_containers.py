"""The images and the compose project, really run."""

import threading
import time

import docker
import docker.errors
import httpx
import pytest
import yaml

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
    project.wait_until(project.rows, 600, "the first step")
    first = time.monotonic() - began
    before = project.container("trainer")
    kill(before)
    killed = time.monotonic()
    project.wait_until(
        lambda: (
            project.container("trainer").attrs["State"]["StartedAt"] != before.attrs["State"]["StartedAt"]
            and project.health("trainer") == "healthy"
        ),
        400,
        "the trainer to come back",
    )
    back = time.monotonic() - killed
    orchestrator = project.container("orchestrator")
    project.wait_until(lambda: project.health("orchestrator") == "exited", 600, "the end of the run")
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
    token = project.read("inference", "/var/lib/keptset/secrets/internal-token")
    server = f"http://127.0.0.1:{project.settings['KEPTSET_INFERENCE_PORT']}"
    url, metrics = f"{server}/inference/v1/generate", f"{server}/metrics"
    sampling = {"max_tokens": 100, "min_tokens": 100, "n": 48, "seed": 1}
    body = {"token_ids": [3, 97, 98, 99], "sampling_params": sampling, "kept_tokens": False}
    answers: list[tuple[float, httpx.Response]] = []  # when it was there
    refused_at: list[float] = []  # when it was sent
    refusals: list[tuple[float, httpx.Response]] = []  # when it was there

    def ask_until_refused() -> None:
        """A client that is never without a request: whatever the moment, some are being sampled."""
        shown = {"Authorization": f"Bearer {key}"}
        while not refused_at:
            sent = time.monotonic()
            try:
                answer = httpx.post(url, headers=shown, json=body, timeout=200, trust_env=False)
            except httpx.TransportError:
                refused_at.append(sent)
                return
            if answer.status_code == 503:
                refused_at.append(sent)
                refusals.append((time.monotonic(), answer))
                return
            answers.append((time.monotonic(), answer))

    def is_sampling() -> bool:
        shown = {"Authorization": f"Bearer {token}"}
        lines = httpx.get(metrics, headers=shown, timeout=60, trust_env=False).text.splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running")]
        return any(float(line.split()[-1]) > 0 for line in running)

    clients = [threading.Thread(target=ask_until_refused) for _ in range(4)]
    for client in clients:
        client.start()
    project.wait_until(is_sampling, 100, "a request to be sampled")
    asked_to_stop = time.monotonic()
    project.container("inference").stop(timeout=55)
    for client in clients:
        client.join(200)
    assert {answer.status_code for _, answer in answers} == {200}
    assert all(len(c["token_ids"]) == 100 for _, answer in answers for c in answer.json()["choices"])
    assert max(there for there, _ in answers) > asked_to_stop, "no request was under way"
    assert min(refused_at) > asked_to_stop - 1, "a request that was under way was cut off"
    for there, refusal in refusals:
        assert there > asked_to_stop, "refused before it was asked to stop"
        assert refusal.json()["error"]["code"] == "stopping"
        assert int(refusal.headers["retry-after"]) > 0
    assert project.container("inference").attrs["State"]["ExitCode"] == 0
    project.container("trainer").stop(timeout=75)
    assert project.container("trainer").attrs["State"]["ExitCode"] == 0


@pytest.mark.parametrize(
    ("override", "devices"),
    [
        ((), ([], [])),
        (("gpu",), (["0"], ["1"])),
        (("colocated",), (["0"], ["0"])),
        (("monitoring",), ([], [])),
        (("secrets",), ([], [])),
        (("gpu", "monitoring", "secrets"), (["0"], ["1"])),
        (("colocated", "monitoring", "secrets"), (["0"], ["0"])),
    ],
)
def test_overrides_fit_the_project(engine, override, devices):
    client, tools, socket = engine
    files = [f"deploy/compose.{name}.yml" for name in override]
    merged = yaml.safe_load(Project(client, tools, socket).compose("config", files=files))["services"]
    for service, ids in zip(("inference", "trainer"), devices, strict=True):
        resources = merged[service].get("deploy", {}).get("resources", {})
        found = [
            one
            for device in resources.get("reservations", {}).get("devices", [])
            for one in device["device_ids"]
        ]
        assert found == ids, "what several files say of devices is added up"
        turns = merged[service]["environment"].get("KEPTSET_COLOCATED")
        assert (str(turns).lower() == "true") == ("colocated" in override)
        assert ("/var/lib/keptset/gpu" in str(merged[service]["volumes"])) == ("colocated" in override)
