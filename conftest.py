"""Settings of hypothesis for the whole repository, and how tests share two processes (`pytest -n 2`)."""

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: how long an example takes says nothing, and a slow draw is no fault.
settings.register_profile("keptset", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keptset")

ENGINES = ("services/inference/tests/engine/", "tests/e2e/", "tests/durability/")
SECTIONS: dict[str, list[str]] = {}


@pytest.fixture(scope="session")
def sections() -> dict[str, list[str]]:
    """Heading -> lines that tests add to the summary; those of other processes arrive as they end."""
    return SECTIONS


SERVICES_TIMEOUT = 1500
"""Seconds for a test that starts an engine or all services: a loaded machine takes minutes to start one."""

LONG = "long"
BY_NAME = (LONG, "containers", "fuzz", "soak")
"""Markers of tests that run only when they are asked for (`make test-long`, `make test-deploy`, `make fuzz`,
`make soak`)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for by name; what starts services gets their time."""
    unasked = [name for name in BY_NAME if name not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        starts_services = item.get_closest_marker("engine") or item.get_closest_marker("e2e")
        if starts_services and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SERVICES_TIMEOUT))
    if config.option.markexpr == LONG:
        items.sort(key=lambda item: not item.nodeid.startswith("tests/"))  # the longest first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file stays in one process, and so do all that share engines, which take 3 GB each.

    Not `--dist loadgroup`: pytest-xdist 3.8 writes groups into node ids, which pytest 9.2 does not allow.
    """
    from xdist.scheduler import LoadFileScheduling, LoadScheduling

    if config.option.markexpr == LONG:  # few, of minutes each: whoever is free takes the next one
        config.option.maxschedchunk = 1
        return LoadScheduling(config, log)

    class ByFileOrEngines(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((room for room in ENGINES if nodeid.startswith(room)), super()._split_scope(nodeid))

    return ByFileOrEngines(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Another process of the run has ended."""
    SECTIONS.update(getattr(node, "workeroutput", {}).get("sections", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sections"] = SECTIONS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for heading, lines in SECTIONS.items():
        terminalreporter.section(heading)
        for line in lines:
            terminalreporter.write_line(line)
