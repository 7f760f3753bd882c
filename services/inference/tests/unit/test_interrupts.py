"""SIGINT is the server's own affair: nothing that it starts hears of it, whatever handlers that has."""

import multiprocessing
import signal
from multiprocessing.process import BaseProcess

import pytest

from keptset_inference.interrupts import keep_interrupts

INTERRUPTED = """
import multiprocessing, os, signal, subprocess, sys, threading
heard = []
signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
thread.start()
thread.join()
below = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('unheard')"
run = subprocess.run([sys.executable, "-c", below], capture_output=True, text=True)
spawned = multiprocessing.get_context("spawn").Process(target=exec, args=(below,))
spawned.start()
spawned.join()
answers.send((heard, run.stdout.strip(), spawned.exitcode))
"""
"""In a process of its own: what becomes of SIGINT there, and in processes that are started there."""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_what_is_started_never_hears_of_it(monkeypatch, method):
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)  # put back afterwards
    keep_interrupts()
    context = multiprocessing.get_context(method)
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=exec, args=(INTERRUPTED, {"answers": writing}))
    process.start()
    writing.close()
    try:
        assert reading.poll(100), "the process has not answered"
        assert reading.recv() == ([], "unheard", 0)
    finally:
        process.kill()
        process.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the server itself hears of it"
