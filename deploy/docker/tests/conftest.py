"""One engine, one set of images and one project for all tests that need containers."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from keptset.ports import pick

from .base_image import base_image
from .compose_project import NAME, Project
from .images import SERVICES, Built, build, built_before
from .package_server import served_packages
from .scratch_engine import Engine, NoEngine, Tools, fetch_tools, machine_engine, mounts_below

KEPT = os.environ.get("DOCKER_SCRATCH")
"""A folder that keeps engine and images from one run to the next, for whoever works on these tests.
Images that are there are not built again, but for those of DOCKER_REBUILD=trainer,inference."""
REBUILD = os.environ.get("DOCKER_REBUILD", "").split(",")
STEPS = 3


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """Where all of the engine is."""
    folder = Path(KEPT) if KEPT else Path(tempfile.mkdtemp(prefix="keptset-docker-", dir="/tmp"))
    folder.mkdir(exist_ok=True)
    yield folder
    assert not mounts_below(folder)
    if not KEPT:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def report(sections: dict[str, list[str]]) -> list[str]:
    """Lines for the end of the test run."""
    return sections.setdefault("containers", [])


@pytest.fixture(scope="session")
def engine(scratch: Path, report: list[str]) -> Iterator[tuple[docker.DockerClient, Tools, str]]:
    """A client, programs, and the engine's address."""
    began, own = time.monotonic(), None
    try:
        tools = fetch_tools(scratch)
        socket = machine_engine()
        if socket is None:
            own = Engine(tools, scratch)
            own.start()
            socket = own.socket
    except NoEngine as reason:
        pytest.skip(f"no container engine can run here: {reason}")
    client = docker.DockerClient(base_url=socket, timeout=300)
    report.append(f"engine {client.version()['Version']}: {time.monotonic() - began:.0f} s")
    try:
        yield client, tools, socket
    finally:
        client.close()
        if own is not None:
            own.stop()


@pytest.fixture(scope="session")
def images(
    engine: tuple[docker.DockerClient, Tools, str], scratch: Path, report: list[str]
) -> dict[str, Built]:
    """All three, built here."""
    client, tools, _ = engine
    began = time.monotonic()
    base = base_image(client, tools, scratch)
    size = client.images.get(base).attrs["Size"] / 1e6
    report.append(f"base image {base}: {size:.0f} MB, {time.monotonic() - began:.0f} s")
    found = {}
    with served_packages() as arguments:
        for service in SERVICES:
            there = built_before(client, service, base) if KEPT and service not in REBUILD else None
            found[service] = there or build(client, service, base, arguments)
            built = found[service]
            report.append(f"{service}: {built.megabytes:.0f} MB above its base, {built.seconds:.0f} s")
    return found


@pytest.fixture(scope="session")
def project(
    engine: tuple[docker.DockerClient, Tools, str], images: dict[str, Built], report: list[str]
) -> Iterator[Project]:
    """The project, up: a run of a few steps is on its way."""
    client, tools, socket = engine
    taken: set[int] = set()
    for _ in range(2):
        taken.add(pick("127.0.0.1", taken))
    inference, orchestrator = taken
    settings = {
        "KEPTSET_STEPS": str(STEPS),
        "KEPTSET_INFERENCE_PORT": str(inference),
        "KEPTSET_ORCHESTRATOR_PORT": str(orchestrator),
    }
    up = Project(client, tools, socket, settings)
    up.down()
    began = time.monotonic()
    try:
        up.up()
        report.append(f"project {NAME} up: {time.monotonic() - began:.0f} s")
        yield up
    finally:
        began = time.monotonic()
        up.down()
        report.append(f"down: {time.monotonic() - began:.0f} s")
