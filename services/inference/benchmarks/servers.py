"""Servers side by side over HTTP: tokens a second, bytes a token, CPU of the API process and of the clients.

    python benchmarks/servers.py --model DIR [--arms "capture v1,capture v1 MessagePack,..."]
        [--sets "about 8,512"] [--budget-seconds 500] [--output benchmarks/results/http-h200.json]
    python benchmarks/servers.py --model TINY --arms "off V1,capture v1" --requests 8 --tokens 16 --cpu

256 requests of 256 tokens at once, from client processes apart that count bytes and do not read them; rounds
forwards and backwards over all servers, which live at the same time and share the GPU. Ours answer JSON, and
MessagePack where the arm says so.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w
from arms import ARMS, EVERYWHERE, SETS, Arm, common_arguments, compare, options, order, shares, write

MSGPACK = " MessagePack"
START_SECONDS = 400
HERE = Path(__file__).parent
DEFAULT = [*EVERYWHERE, "capture v1" + MSGPACK, "capture native" + MSGPACK]


def main() -> None:
    """Start the servers, alternate, print and write."""
    parser = options(__doc__, DEFAULT)
    parser.add_argument("--clients", type=int, default=4, help="processes that share the requests")
    args = parser.parse_args()
    start = time.monotonic()
    names = args.arms.split(",")
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in dict.fromkeys(name.removesuffix(MSGPACK) for name in names):
            servers[name] = stack.enter_context(Server(name, args))
        for name in list(servers):  # all start at the same time
            try:
                servers[name].wait()
                print(f"{name}: ready after {time.monotonic() - start:.0f} s", flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
                del servers[name]
        names = [name for name in names if name.removesuffix(MSGPACK) in servers]
        results: dict[str, Any] = {}
        for sets, until in shares(args, start):
            results[sets] = rounds(servers, names, sets, args, until)
            print(json.dumps({sets: results[sets]["compared"]}, indent=1), flush=True)
            write(args, results)
        for server in servers.values():  # all at the same time; leaving waits for each
            server.end()
    if missing := {name.removesuffix(MSGPACK) for name in args.arms.split(",")} - set(servers):
        sys.exit(f"did not start: {sorted(missing)}")


def rounds(
    servers: dict[str, "Server"], names: list[str], sets: str, args: argparse.Namespace, until: float
) -> dict[str, Any]:
    """One warm-up, then rounds until the budget is used up."""
    ask = lambda name: servers[name.removesuffix(MSGPACK)].load(sets, args, name.endswith(MSGPACK))  # noqa: E731
    for name in names:
        ask(name)
    batches: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round_ in range(args.rounds):
        if time.monotonic() > until:
            break
        for name in order(names, round_):
            batches[name].append(ask(name))
            print(f"{sets}, round {round_}, {name}: {batches[name][-1]}", flush=True)
    rates = {name: [batch["tokens_per_second"] for batch in found] for name, found in batches.items()}
    compared = compare(rates)
    of_msgpack = {
        name.removesuffix(MSGPACK): found for name, found in rates.items() if name.endswith(MSGPACK)
    }
    others = {name: found for name, found in rates.items() if name not in of_msgpack}
    compared |= {f"MessagePack: {pair}": found for pair, found in compare(others | of_msgpack).items()}
    return {"batches": batches, "compared": compared}


class Server:
    """A server process; healthy after `wait`."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.arm: Arm = ARMS[name]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.directory = tempfile.TemporaryDirectory(prefix="keptset-benchmark-")
        engine = common_arguments(args, self.arm)
        self.command = self._ours(args, engine) if self.arm.ours else self._stock(args, engine)

    def _ours(self, args: argparse.Namespace, engine: dict[str, Any]) -> list[str]:
        settings = {
            "model": str(Path(args.model).resolve()),
            "port": self.port,
            "enable_return_sampling_mask": self.arm.capture is not None,
            "capture": self.arm.capture or "auto",
            "mask_padded_ids": False,  # the tokenizer of a random model says nothing
            "vllm": engine,
        }
        config = Path(self.directory.name) / "inference.toml"
        config.write_text(tomli_w.dumps({"inference": settings}))
        return [sys.executable, "-m", "keptset_inference", "--config", str(config)]

    def _stock(self, args: argparse.Namespace, engine: dict[str, Any]) -> list[str]:
        command = [sys.executable, str(HERE / "stock_server.py"), "--model", args.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enable-scale-out"]
        command += ["--generation-config", "vllm"]
        for name, value in engine.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return command

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(
            self.command,
            env=self.arm.environment(Path(self.directory.name)),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def wait(self) -> None:
        """Until it is healthy; RuntimeError if it will not be."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"its process ended with {self.process.returncode}; its log is above")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"not healthy after {START_SECONDS} s")

    def end(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def __exit__(self, *_: object) -> None:
        self.end()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def load(self, sets: str, args: argparse.Namespace, msgpack: bool) -> dict[str, float]:
        """All requests at once, from all clients."""
        sampling = SETS[sets] | {"logprobs": 0, "max_tokens": args.tokens, "ignore_eos": True}
        sampling |= self.arm.sampling
        accept = "application/msgpack" if msgpack else "application/json"
        each = args.requests // args.clients
        command = [sys.executable, str(HERE / "http_load.py"), "--port", str(self.port), "--accept", accept]
        command += ["--requests", str(each), "--prompt", str(args.prompt), "--sampling", json.dumps(sampling)]
        before = self._cpu()
        clients = [
            subprocess.Popen([*command, "--first", str(i * each)], stdout=subprocess.PIPE, text=True)
            for i in range(args.clients)
        ]
        answers = [json.loads(client.communicate()[0]) for client in clients]
        spent = self._cpu() - before
        if error := next((answer["error"] for answer in answers if "error" in answer), None):
            raise SystemExit(f"a request failed: {error}")
        tokens = each * args.clients * args.tokens
        seconds = max(answer["seconds"] for answer in answers)
        return {
            "tokens_per_second": round(tokens / seconds, 1),
            "bytes_a_token": round(sum(answer["bytes"] for answer in answers) / tokens, 1),
            "api_cpu_us_a_token": round(1e6 * spent / tokens, 2),
            "client_cpu_us_a_token": round(1e6 * sum(answer["cpu"] for answer in answers) / tokens, 2),
        }

    def _cpu(self) -> float:
        """Seconds of the API process, its threads included; the engine has processes of its own."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
