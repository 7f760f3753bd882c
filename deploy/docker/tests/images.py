"""Builds the project's images with the Docker engine's own builder."""

import time
from dataclasses import dataclass
from pathlib import Path

import docker

ROOT = Path(__file__).parents[3]
SERVICES = ("orchestrator", "trainer", "inference")
VERSION = "test"
LAST_LINES = 60


@dataclass(frozen=True)
class Built:
    """One image."""

    service: str
    tag: str
    seconds: float
    megabytes: float
    """Above its base."""


def build(client: docker.DockerClient, service: str, base: str, arguments: dict[str, str]) -> Built:
    """Build the image of a service for a CPU.

    Raises:
        RuntimeError: with the last lines of the build.
    """
    tag = f"keptset-{service}:{VERSION}"
    began, lines = time.monotonic(), list[str]()
    # Host networking: an engine without a bridge has no other, and local packages are served on loopback.
    for event in client.api.build(
        path=str(ROOT),
        dockerfile=f"deploy/docker/{service}.Dockerfile",
        tag=tag,
        buildargs={"BASE": base, "VERSION": VERSION, **arguments},
        network_mode="host",
        rm=True,
        forcerm=True,
        decode=True,
    ):
        lines.append(str(event.get("stream") or event.get("error") or "").rstrip())
        if "error" in event:
            last = "\n".join([line for line in lines if line][-LAST_LINES:])
            raise RuntimeError(f"the image of {service} cannot be built:\n{last}")
    return Built(service, tag, time.monotonic() - began, _above(client, tag, base))


def built_before(client: docker.DockerClient, service: str, base: str) -> Built | None:
    """The image of an earlier run, if there is one."""
    tag = f"keptset-{service}:{VERSION}"
    return Built(service, tag, 0.0, _above(client, tag, base)) if client.images.list(name=tag) else None


def _above(client: docker.DockerClient, tag: str, base: str) -> float:
    return (client.images.get(tag).attrs["Size"] - client.images.get(base).attrs["Size"]) / 1e6
