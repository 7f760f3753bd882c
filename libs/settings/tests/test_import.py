"""Any machine validates any config: nothing heavy is imported, and what takes long only when it is needed."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import keptset_settings
early = "pydantic_settings" in sys.modules
keptset_settings.load_service("inference", ["--model", "m"])
print(json.dumps([early, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def in_a_fresh_process() -> tuple[bool, set[str]]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    early, modules = json.loads(done.stdout)
    return early, set(modules)


def test_no_torch_vllm_or_numpy():
    _, modules = in_a_fresh_process()
    assert "pydantic_settings" in modules
    assert not modules & {"torch", "vllm", "numpy", "transformers", "msgspec", "httpx", "fastapi"}


def test_the_loader_is_imported_only_to_load():
    early, _ = in_a_fresh_process()
    assert not early  # pydantic_settings takes longer than all the rest
