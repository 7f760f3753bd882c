"""The compose project under test: brought up, looked at, taken down."""

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container

from .images import ROOT, VERSION
from .scratch_engine import Tools

NAME = "keptset-test"
UP_SECONDS = 600
METRICS = "/var/lib/keptset/runs/run/metrics.jsonl"


def compose_command(tools: Tools) -> list[str]:
    """Compose v2 as the client's plugin where there is one, else docker-compose 1.29."""
    try:
        tools.run("docker", "compose", "version", seconds=120)
    except RuntimeError:
        script = Path(tools.which("docker-compose"))
        return ["python3-of-debian", str(script)] if script.read_bytes()[:2] == b"#!" else [str(script)]
    return ["docker", "compose"]


@dataclass
class Project:
    """Containers of one `docker compose up`."""

    client: docker.DockerClient
    tools: Tools
    socket: str
    settings: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, files: Sequence[str] = (), seconds: float = 120) -> str:
        """Run compose on docker-compose.yml and further files; its output."""
        command = compose_command(self.tools)
        environment = {**self.tools.environment, **self.settings, "DOCKER_HOST": self.socket}
        environment |= {"KEPTSET_VERSION": VERSION, "COMPOSE_HTTP_TIMEOUT": "300", "HOME": "/nonexistent"}
        if command[0] == "python3-of-debian":
            command = ["/usr/bin/python3", *command[1:]]
            environment["PYTHONPATH"] = str(Path(command[1]).parents[1] / "lib/python3/dist-packages")
        named = [part for file in ("docker-compose.yml", *files) for part in ("-f", str(ROOT / file))]
        place = ["-p", NAME, "--project-directory", str(ROOT)]
        tools = Tools(environment)
        return tools.run(*command, *named, *place, *arguments, seconds=seconds)

    def up(self) -> None:
        """Return once every container is started, in the order of health.

        Raises:
            RuntimeError: with the ends of all logs.
        """
        try:
            self.compose("up", "-d", "--no-build", seconds=UP_SECONDS)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.logs()}") from error

    def down(self) -> None:
        """Containers, networks and volumes go."""
        self.compose("down", "-v", "--remove-orphans", "-t", "10", seconds=180)
        left = self.client.containers.list(all=True, filters={"label": f"com.docker.compose.project={NAME}"})
        assert not left, f"left after `down`: {left}"

    def container(self, service: str) -> Container:
        """The container of a service, with fresh attributes."""
        labels = [f"com.docker.compose.project={NAME}", f"com.docker.compose.service={service}"]
        (found,) = self.client.containers.list(all=True, filters={"label": labels})
        return found

    def health(self, service: str) -> str:
        """What the engine says of it: starting, healthy, unhealthy; else its status."""
        state = self.container(service).attrs["State"]
        return state.get("Health", {}).get("Status") if state["Running"] else state["Status"]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl on the volume."""
        try:
            stream, _ = self.container("orchestrator").get_archive(METRICS)
        except docker.errors.NotFound:
            return []
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            assert member is not None
            return [json.loads(line) for line in member.read().splitlines() if line.endswith(b"}")]

    def read(self, service: str, path: str) -> str:
        """A file as the service's own user reads it."""
        code, output = self.container(service).exec_run(["cat", path])
        assert code == 0, output
        return output.decode().strip()

    def wait_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Waits, but never for long; the error has the ends of all logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self, lines: int = 25) -> str:
        """The ends of all logs."""
        label = {"label": f"com.docker.compose.project={NAME}"}
        found = self.client.containers.list(all=True, filters=label)
        texts = []
        for container in found:
            end = container.logs(tail=lines).decode(errors="replace")
            texts.append(f"--- {container.name} ({container.status})\n{end}")
        return "\n".join(texts)


def kill(container: Container) -> None:
    """As the kernel does when memory is short; after `docker kill`, which counts as a stop, none restarts."""
    os.kill(container.attrs["State"]["Pid"], 9)
