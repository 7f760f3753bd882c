"""Any machine validates any config: nothing heavy is imported, and quickly."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
began = time.process_time()
import keptset_settings
imported = time.process_time() - began
early = "pydantic_settings" in sys.modules
keptset_settings.load_service("inference", ["--model", "m"])
print(json.dumps([imported, early, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def in_a_fresh_process() -> tuple[float, bool, set[str]]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds, early, modules = json.loads(done.stdout)
    return seconds, early, set(modules)


def test_no_torch_vllm_or_numpy():
    _, _, modules = in_a_fresh_process()
    assert "pydantic_settings" in modules
    assert not modules & {"torch", "vllm", "numpy", "transformers", "msgspec", "httpx", "fastapi"}


def test_import_is_quick():
    runs = [in_a_fresh_process() for _ in range(3)]
    assert min(seconds for seconds, _, _ in runs) < 0.5  # CPU seconds, 0.3 on a busy machine
    assert not any(early for _, early, _ in runs)  # it takes longer than all the rest
