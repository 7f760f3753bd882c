"""Settings of hypothesis for the whole repository, and how tests share two processes (`pytest -n 2`)."""

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: how long an example takes says nothing, and a slow draw is no fault.
settings.register_profile("keptset", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("keptset")

SECTIONS: dict[str, list[str]] = {}


@pytest.fixture(scope="session")
def sections() -> dict[str, list[str]]:
    """Heading -> lines that tests add to the summary; those of other processes arrive as they end."""
    return SECTIONS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts engines stays in one process each: its servers are shared, and take 3 GB."""
    for item in items:
        alone = next((name for name in ("engine", "e2e") if item.get_closest_marker(name)), None)
        item.add_marker(pytest.mark.xdist_group(alone or str(item.path)))


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
