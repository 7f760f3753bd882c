"""No wait and no duration asks a clock that somebody can set: the wall clock is for stamps only."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STAMPS = {
    "services/orchestrator/tests/test_clocks.py": "lets it jump",
    "deploy/local/src/keptset/restarts.py": "when a service died, for people",
    "services/inference/src/keptset_inference/generate/route.py": "`created` of an answer",
    "services/orchestrator/src/keptset_orchestrator/tokenizer.py": "chat templates that write the date",
}
"""Files that may ask the wall clock, and what for."""

WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "asctime", "clock_gettime"},
    "datetime": {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"},
    "os.path": {"getmtime", "getctime", "getatime"},
}
FILE_TIMES = {"st_mtime", "st_ctime", "st_atime", "st_mtime_ns", "st_ctime_ns", "st_atime_ns"}
"""Written by the wall clock as well: an age that is told by them is none."""
BANNED = {f"{module}.{name}" for module, names in WALL_CLOCK.items() for name in names}


def asked(source: str) -> list[tuple[int, str]]:
    """Lines that name a wall clock, under whatever name it was imported."""
    tree, known = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                one.asname or one.name.partition(".")[0]: (one.asname and one.name) or ""
                for one in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FILE_TIMES:
            found.append((node.lineno, node.attr))
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        first, _, rest = ast.unparse(node).partition(".")
        if first in known and ".".join(filter(None, (known[first] or first, rest))) in BANNED:
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndeadline = time.time() + 5",
        "import time as clock\nclock.time_ns()",
        "from time import time\ntime()",
        "from time import time as now\nwait(clock=now)",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import UTC, datetime as d\nd.now(UTC)",
        "from os import path\npath.getmtime(file)",
        "import os\nos.path.getmtime(file)",
        "age = file.stat().st_mtime",
    ],
)
def test_wall_clocks_are_found_by_any_name(source):
    assert asked(source)


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndeadline = time.monotonic() + 5\ntime.sleep(1)",
        "from datetime import timedelta\ntimedelta(seconds=1)",
        "import asyncio\nasyncio.timeout(time)",
        "from datetime import date, time\nisinstance(value, date | time)",
    ],
)
def test_other_clocks_are_not(source):
    assert not asked(source)


def test_only_stamps_ask_the_wall_clock():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 300
    found = {name: lines for name in files if (lines := asked((ROOT / name).read_text()))}
    wrong = [f"{name}:{line}: {what}" for name in found.keys() - STAMPS.keys() for line, what in found[name]]
    assert not wrong, "use time.monotonic() for what is waited for or measured"
    assert all(len(found[name]) == 1 for name in STAMPS), "one stamp each, and none that is there no more"
