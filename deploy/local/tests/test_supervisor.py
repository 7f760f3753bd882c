"""Real processes, but tiny ones."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from keptset import groups
from keptset import supervisor as supervisor_module
from keptset.supervisor import ProcessDied, Stopped, Supervisor, tail

SLEEP = ["sleep", "300"]
IGNORES_SIGTERM = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True);"
    "time.sleep(300)",
]


def wait_for(condition, seconds=100.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def has_text(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def test_a_process_that_dies_is_named_with_its_last_lines(tmp_path):
    log = tmp_path / "trainer.log"
    with Supervisor() as supervisor:
        sleeper = supervisor.start("inference", SLEEP, tmp_path / "inference.log")
        supervisor.start("trainer", ["sh", "-c", "seq 100; echo broken >&2; exit 3"], log)
        wait_for(lambda: supervisor.processes[1].died())
        with pytest.raises(ProcessDied, match=r"trainer died \(exit code 3\)") as caught:
            supervisor.check()
    assert str(log) in str(caught.value)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  | ")]
    assert lines == [f"  | {n}" for n in range(82, 101)] + ["  | broken"]
    assert groups.members(sleeper.popen.pid) == []


def test_the_death_of_a_killed_process_names_the_signal(tmp_path):
    with Supervisor() as supervisor:
        process = supervisor.start("inference", SLEEP, tmp_path / "log")
        os.kill(process.popen.pid, signal.SIGKILL)
        wait_for(process.died)
        with pytest.raises(ProcessDied, match=r"inference died \(killed by SIGKILL\)"):
            supervisor.check()


def test_only_what_may_end_ends_with_code_0(tmp_path):
    with Supervisor() as supervisor:
        ends = supervisor.start("orchestrator", ["true"], tmp_path / "a", may_end=True)
        wait_for(lambda: ends.popen.poll() is not None)
        supervisor.check()
        dies = supervisor.start("inference", ["true"], tmp_path / "b")
        wait_for(dies.died)
        with pytest.raises(ProcessDied, match=r"inference died \(exit code 0\)"):
            supervisor.check()


def test_the_cause_is_named_not_the_victim_that_gives_up_first(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "CAUSE_GRACE", 100.0)
    with Supervisor() as supervisor:
        supervisor.start("inference", ["sh", "-c", "sleep 0.5; exit 7"], tmp_path / "a")
        victim = supervisor.start("orchestrator", ["false"], tmp_path / "b", may_end=True)
        wait_for(victim.died)
        with pytest.raises(ProcessDied, match=r"inference died \(exit code 7\)"):
            supervisor.check()


def test_the_newest_ends_first(tmp_path):
    order = tmp_path / "order"
    with Supervisor() as supervisor:
        for name in ("inference", "trainer", "orchestrator"):
            last_words = f"sleep 0.1; echo {name} >> {order}; exit 0"
            script = f"trap '{last_words}' TERM; echo up; while :; do sleep 0.02; done"
            supervisor.start(name, ["sh", "-c", script], tmp_path / f"{name}.log")
            wait_for(lambda name=name: has_text(tmp_path / f"{name}.log", "up"))
    assert order.read_text().split() == ["orchestrator", "trainer", "inference"]


def test_services_end_in_order_though_nobody_reads_what_is_said(tmp_path, monkeypatch):
    """As after Ctrl-C of `keptset run ... 2>&1 | tee log`, which ends the reader too."""
    script = "trap 'sleep 0.1; exit 3' TERM; echo up; while :; do sleep 0.02; done"
    started = []

    def be_signalled() -> None:
        with Supervisor() as supervisor:
            for name in ("trainer", "inference"):
                started.append(supervisor.start(name, ["sh", "-c", script], tmp_path / name))
            wait_for(lambda: all(has_text(process.log, "up") for process in started))
            monkeypatch.setattr(sys, "stderr", Unread())
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: False)

    with pytest.raises(Stopped):
        be_signalled()
    assert [process.popen.returncode for process in started] == [3, 3]


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_who_ignores_sigterm_is_killed_after_its_own_grace_and_named(tmp_path, capfd):
    with Supervisor() as supervisor:
        supervisor.start("trainer", SLEEP, tmp_path / "other", grace=1000)
        process = supervisor.start("inference", IGNORES_SIGTERM, tmp_path / "log", grace=0.3)
        wait_for(lambda: has_text(tmp_path / "log", "ready"))
        began = time.monotonic()
    assert time.monotonic() - began >= 0.3
    assert process.popen.returncode == -signal.SIGKILL
    said = capfd.readouterr().err
    assert "told to stop, inference did not end as it should (killed by SIGKILL after 0.3 s)" in said
    assert "  | ready" in said
    assert "trainer" not in said


def test_who_fails_as_it_is_told_to_stop_is_named_with_its_last_lines(tmp_path, capfd):
    """As a trainer whose last checkpoint the disk refuses: nobody looks at its log otherwise."""
    script = "trap 'echo the disk is full; exit 1' TERM; echo up; while :; do sleep 0.02; done"
    with Supervisor() as supervisor:
        supervisor.start("trainer", ["sh", "-c", script], tmp_path / "log")
        wait_for(lambda: has_text(tmp_path / "log", "up"))
    said = capfd.readouterr().err
    assert "keptset: told to stop, trainer did not end as it should (exit code 1); the end of" in said
    assert "  | the disk is full" in said


@pytest.mark.parametrize("code", [0, 128 + signal.SIGTERM])
def test_a_proper_end_is_no_news(tmp_path, capfd, code):
    script = f"trap 'exit {code}' TERM; echo up; while :; do sleep 0.02; done"
    with Supervisor() as supervisor:
        supervisor.start("orchestrator", ["sh", "-c", script], tmp_path / "log")
        supervisor.start("inference", SLEEP, tmp_path / "other")
        wait_for(lambda: has_text(tmp_path / "log", "up"))
    assert capfd.readouterr().err == ""


def test_what_a_leader_leaves_behind_ends_too(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "ORPHAN_GRACE", 100.0)
    script = "sleep 300 & echo up; exit 0"
    with Supervisor() as supervisor:
        process = supervisor.start("inference", ["sh", "-c", script], tmp_path / "log", may_end=True)
        wait_for(lambda: process.popen.poll() is not None)
        assert len(groups.members(process.popen.pid)) == 1
        began = time.monotonic()
    assert groups.members(process.popen.pid) == []
    assert time.monotonic() - began < groups.ORPHAN_GRACE, "it was not asked, but killed"


def test_ended_processes_are_neither_running_nor_dead(tmp_path):
    with Supervisor() as supervisor:
        process = supervisor.start("warm start", SLEEP, tmp_path / "log")
        supervisor.end(process)
        supervisor.check()
        assert groups.members(process.popen.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_answered_at_once_and_ends_everything(tmp_path, number, capfd):
    before = signal.getsignal(number)

    def be_signalled():
        with Supervisor() as supervisor:
            started.append(supervisor.start("inference", SLEEP, tmp_path / "log"))
            os.kill(os.getpid(), number)
            time.sleep(5)

    started = []
    with pytest.raises(Stopped) as caught:
        be_signalled()
    assert caught.value.number == number
    assert str(caught.value) == number.name
    assert f"keptset: {number.name}: stopping inference (at most 15 s); once more" in capfd.readouterr().err
    assert groups.members(started[0].popen.pid) == []
    assert signal.getsignal(number) == before


def run_script(text: str, *arguments: object, errors: Path | None = None) -> "subprocess.Popen[str]":
    script = "import sys, time\nfrom pathlib import Path\nfrom keptset.supervisor import Supervisor\n"
    return subprocess.Popen(
        [sys.executable, "-c", script + textwrap.dedent(text), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=None if errors is None else errors.open("w"),
        text=True,
    )


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path):
    log, errors = tmp_path / "log", tmp_path / "errors"
    script = f"""
    with Supervisor() as supervisor:
        process = supervisor.start("inference", {IGNORES_SIGTERM!r}, Path(sys.argv[1]), grace=1000)
        print(process.popen.pid, flush=True)
        time.sleep(1000)
    """
    with run_script(script, log, errors=errors) as parent:
        group = int(parent.stdout.readline())
        wait_for(lambda: has_text(log, "ready"))
        parent.send_signal(signal.SIGINT)
        wait_for(lambda: "stopping inference" in errors.read_text())  # else two signals would be one
        time.sleep(0.3)
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=200) != 0
    assert groups.members(group) == []


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    script = """
    with Supervisor() as supervisor:
        sleeper = supervisor.start("inference", ["sleep", "300"], Path(sys.argv[1]))
        family = supervisor.start("trainer", ["sh", "-c", "sleep 300 & sleep 300; :"], Path(sys.argv[1]))
        print(sleeper.popen.pid, family.popen.pid, supervisor._watcher.pid, flush=True)
        time.sleep(100)
    """
    with run_script(script, tmp_path / "log") as parent:
        *pids, watcher = map(int, parent.stdout.readline().split())
        wait_for(lambda: len(groups.members(pids[1])) == 3)
        parent.kill()
        parent.wait()
        for group in (*pids, watcher):
            wait_for(lambda group=group: not groups.members(group))


def test_a_watcher_that_somebody_ended_is_missed(tmp_path, capfd):
    with Supervisor() as supervisor:
        supervisor._watcher.kill()
        supervisor._watcher.wait()
        supervisor.start("inference", ["sleep", "300"], tmp_path / "log")
        supervisor.start("trainer", ["sleep", "300"], tmp_path / "log")
    assert capfd.readouterr().err.count("somebody ended keptset.watcher") == 1


def test_the_environment_is_the_given_one(tmp_path):
    log = tmp_path / "log"
    with Supervisor() as supervisor:
        command = [sys.executable, "-c", "import os; print(sorted(os.environ))"]
        process = supervisor.start("x", command, log, {"SECRET": "s", "LC_ALL": "C"}, may_end=True)
        wait_for(lambda: process.popen.poll() is not None)
    assert "'SECRET'" in log.read_text()
    assert "HOME" not in log.read_text()


def test_the_tail_of_an_empty_log_says_so(tmp_path):
    (tmp_path / "log").touch()
    assert tail(tmp_path / "log") == "(it is empty)"


def test_signals_that_arrive_while_a_process_starts_leave_nobody_unlisted(tmp_path, monkeypatch):
    def popen(command, **options):
        made = real(command, **options)
        if command == SLEEP:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # the handler runs in here
            started.append(made)
        return made

    real, started = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(Stopped), Supervisor() as supervisor:
        supervisor.start("inference", SLEEP, tmp_path / "log")
    assert len(started) == 1
    assert groups.members(started[0].pid) == []
