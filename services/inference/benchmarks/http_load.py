"""A client process: so many requests at once over plain sockets; the answers are counted, not read.

Prints one line of JSON: seconds, bytes of the bodies, CPU seconds of this process.
"""

import argparse
import asyncio
import json
import time
from typing import Any


async def ask(host: str, port: int, path: str, body: bytes, accept: str) -> tuple[int, bytes]:
    """One request on a connection of its own: the status, and the body as it came."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept: {accept}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    raw = await reader.read()
    writer.close()
    header, _, content = raw.partition(b"\r\n\r\n")
    return int(header.split(b" ", 2)[1]), content


async def main() -> None:
    """Ask, wait for all, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--accept", default="application/json")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--sampling", type=json.loads, required=True)
    args = parser.parse_args()
    bodies = []
    for number in range(args.first, args.first + args.requests):
        prompt = [5 + (number + place) % 250 for place in range(args.prompt)]
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": args.sampling}
        bodies.append(json.dumps(body).encode())
    path = "/inference/v1/generate"
    start = time.monotonic()
    answers = await asyncio.gather(*(ask("127.0.0.1", args.port, path, body, args.accept) for body in bodies))
    seconds = time.monotonic() - start
    wrong = next((content[:300] for status, content in answers if status != 200), None)
    size = sum(len(content) for _, content in answers)
    answer = {"seconds": seconds, "bytes": size, "cpu": time.process_time()}
    print(json.dumps(answer | ({"error": wrong.decode(errors="replace")} if wrong else {})), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
