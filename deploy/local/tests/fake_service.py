"""Stands in for all three services: `fake_service.py NAME --config FILE`; FAKE_<NAME> says how it misbehaves.

`exit`: dies at once; `sick`: never healthy; `late`: dies after the first step; `once FILE`: likewise, if it
finds no such file; `slow`: a step takes long; `short`: the orchestrator ends early; `wrong`: its third step
has ratios that are off.
"""

import json
import os
import sys
import time
import tomllib
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def warm_start(arguments: list[str]) -> None:
    """Makes a "model"."""
    directory = Path(arguments[arguments.index("--directory") + 1])
    print("step 1 of 2", flush=True)
    directory.mkdir(parents=True)
    recipe = {"min_letters": 4, "max_letters": 12, "seed": 0}
    (directory / "recipe.json").write_text(json.dumps({"recipe": recipe}))


def serve(settings: dict, sick: bool) -> None:
    """Answers /health until killed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if sick else 200)
            self.end_headers()
            self.wfile.write(b"still loading" if sick else b"")

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((settings["host"], settings["port"]), Handler).serve_forever()


def orchestrate(settings: dict, behaviour: str) -> None:
    """Waits for the others and writes a row a step."""
    for url in (*settings["inference_urls"], settings["trainer_url"]):
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                time.sleep(0.02)
    path = Path(settings["output_dir"]) / "metrics.jsonl"
    done = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        for step in range(done + 1, settings["steps"] + (0 if behaviour == "short" else 1)):
            row = {
                "step": step,
                "reward/mean": step / 10,
                "mismatch_kl/mean": 1e-9,
                "ratio/max_abs_log": 1e-6,
            }
            if behaviour == "wrong" and step == 3:
                row["ratio/max_abs_log"] = 0.4
            row |= {"kept/coverage": 1.0, "kept/size_mean": 3.0, "rollout/error_rate": 0.0}
            print(json.dumps(row), file=file, flush=True)
            once = Path(behaviour.removeprefix("once "))
            if behaviour.startswith("once ") and not once.exists():
                once.touch()
                sys.exit("orchestrator: something broke")
            if behaviour == "late":
                time.sleep(1)  # long enough for the row to be shown
                sys.exit("orchestrator: something broke")
            time.sleep(60 if behaviour == "slow" else 0.01)


def main() -> None:
    """Plays one service."""
    name, *arguments = sys.argv[1:]
    behaviour = os.environ.get(f"FAKE_{name.upper()}", "")
    print("threads:", os.environ["OMP_NUM_THREADS"], flush=True)
    print("KEPTSET variables:", sorted(v for v in os.environ if v.startswith("KEPTSET_")), flush=True)
    print("GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    if behaviour == "exit":
        sys.exit(f"{name}: cannot start")
    if arguments[0] == "warm-start":
        warm_start(arguments[1:])
        return
    settings = tomllib.loads(Path(arguments[1]).read_text())[name]
    if name == "orchestrator":
        orchestrate(settings, behaviour)
    else:
        serve(settings, behaviour == "sick")


if __name__ == "__main__":
    main()
