"""Settings of hypothesis for the whole repository, and how tests share processes (`pytest -n 3`)."""

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: how long an example takes says nothing, and a slow draw is no fault.
settings.register_profile("keptset", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keptset")

ENGINES = ("services/inference/tests/engine/", "tests/e2e/", "tests/durability/")
WITH_ENGINES = 2
"""Processes that start engines at a time in long tests: all together then take 8 GB."""

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
    items.sort(key=_turn_of_long if config.option.markexpr == LONG else _turn)


def _turn(item: pytest.Item) -> tuple[bool, ...]:
    """Engines first; at the end what takes milliseconds a file, so that all processes end together."""
    return not item.nodeid.startswith(ENGINES), item.nodeid.startswith("libs/")


def _turn_of_long(item: pytest.Item) -> tuple[bool, ...]:
    """The longest first. The server that others share stays until the end, so who starts it comes late."""
    return (not item.nodeid.startswith("tests/"),)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file stays in one process, and so does all that starts engines, which take 3 GB each. Long tests each
    go to whoever is free, those with engines to two processes only.

    Not `--dist loadgroup`: pytest-xdist 3.8 writes groups into node ids, which pytest 9.2 does not allow.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order of the tests counts, not how many a file has
    long = config.option.markexpr == LONG

    class EnginesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if long:
                return nodeid
            return "engines" if nodeid.startswith(ENGINES) else super()._split_scope(nodeid)

        def _reschedule(self, node: object) -> None:
            if long and self._pending_of(self.assigned_work[node]) > 1:
                return  # it has one that runs and the next one: others may be free before it
            super()._reschedule(node)

        def _assign_work_unit(self, node: object) -> None:
            waiting = list(self.workqueue)
            if list(self.assigned_work).index(node) >= WITH_ENGINES:
                waiting = [scope for scope in waiting if not scope.startswith(ENGINES)]
            if not waiting:
                node.shutdown()
                return
            self.workqueue.move_to_end(waiting[0], last=False)
            super()._assign_work_unit(node)

    return EnginesTogether(config, log)


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
