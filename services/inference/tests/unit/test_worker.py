"""The process that samples loads nothing that is for another platform."""

import json
import subprocess
import sys

AS_ON_A_GPU = """
import json, sys
from vllm.platforms import current_platform

type(current_platform).is_cpu = lambda self: False
from keptset_inference.capture.worker import KeptsetWorker

loaded = [name for name in sys.modules if ".worker.cpu" in name]
print(json.dumps([KeptsetWorker.__mro__[1].__module__, loaded]))
"""


def test_a_gpu_keeps_its_streams_and_pinned_memory():
    """The CPU worker of vLLM replaces torch.cuda.Event, Tensor.pin_memory and more by doing nothing, in every
    process that imports it.
    """
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_A_GPU], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["vllm.v1.worker.gpu_worker", []]
