"""Workers that wait for a trainer go on when their server says so, is gone, or the time is up."""

import os
import resource
import subprocess
import sys
import threading
import time

import pytest

from keptset_inference.weights.lease import CalledOff, Lease, Watched


class Waiting:
    """Work that waits until it is called off."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def under(self, lease: str, seconds: float = 60) -> str:
        with (
            pytest.raises(CalledOff) as called_off,
            Watched(lease, seconds, "the trainer", self.gone.set, grace=5),
        ):
            assert self.gone.wait(30), "nobody called it off"
        return str(called_off.value)


def test_work_that_ends_in_time_is_not_disturbed():
    lease, waiting = Lease(), Waiting()
    with Watched(lease.name, 60, "the trainer", waiting.gone.set, grace=5):
        pass
    with (
        pytest.raises(ValueError, match="its own"),
        Watched(lease.name, 60, "the trainer", waiting.gone.set, grace=5),
    ):
        raise ValueError("its own")
    assert not waiting.gone.is_set()
    lease.end()


def test_the_server_calls_all_its_workers_off():
    lease, said = Lease(), []
    workers = [
        threading.Thread(target=lambda: said.append(Waiting().under(lease.name)), daemon=True)
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    time.sleep(0.2)
    assert said == []
    lease.end()
    for worker in workers:
        worker.join(10)
    assert len(said) == 3
    assert all("waiting for the trainer: it was called off" in one for one in said)


def test_a_server_that_is_killed_calls_them_off_too():
    program = "import time; from keptset_inference.weights.lease import Lease; lease = Lease()\n"
    program += "print(lease.name, flush=True); time.sleep(60)"
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    name = server.stdout.readline().strip()
    threading.Timer(0.2, server.kill).start()
    assert "it was called off" in Waiting().under(name)
    server.wait(10)


@pytest.mark.parametrize("lease", ["of-another-machine", None])
def test_time_is_up_with_or_without_a_lease(lease):
    kept = Lease()
    assert "waiting for the trainer: that was all of 0.1 s" in Waiting().under(lease or kept.name, 0.1)


@pytest.fixture
def many_open_files():
    """As in a worker of many GPUs: every descriptor from here on is beyond what `select` can look at."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 2048 else max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < 1024:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_worker_with_many_open_files_is_watched_all_the_same():
    lease = Lease()
    assert "that was all of 0.1 s" in Waiting().under(lease.name, 0.1)
    threading.Timer(0.2, lease.end).start()
    assert "it was called off" in Waiting().under(lease.name)
    with Watched("none", 60, "the trainer", pytest.fail, grace=5):
        pass


def test_work_that_does_not_return_takes_its_process_with_it():
    program = "import time; from keptset_inference.weights.lease import Watched\n"
    program += "with Watched('none', 0.1, 'the trainer', lambda: None, grace=0.1): time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 70
    assert "waiting for the trainer" in done.stdout
    assert "nothing ends that but this process" in done.stdout
