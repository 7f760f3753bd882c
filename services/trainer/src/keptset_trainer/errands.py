"""What the ingest process asks of the training loop between two steps: a file each way. Without torch."""

import asyncio
import json
import time
import uuid
from typing import Any

from .durable import write_json
from .folders import Folders

POLL_SECONDS = 0.01


class ErrandFailed(RuntimeError):
    """The loop could not do it.

    Attributes:
        kind: what it answered, or "loop_timeout" if it did not.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def ask(folders: Folders, errand: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Have the loop do something; its answer. One at a time.

    Raises:
        ErrandFailed: it says why it cannot, or did not answer within `seconds`.
    """
    name = uuid.uuid4().hex
    deadline = time.monotonic() + seconds + 1  # its own words about a time-out say more
    asked = {**errand, "name": name, "seconds": seconds}
    writing = asyncio.ensure_future(asyncio.to_thread(write_json, folders.errand, asked))
    try:
        await asyncio.shield(writing)
        while True:
            late = time.monotonic() >= deadline  # asked first: what is there by then counts
            answer = answered(folders)
            if answer.get("name") == name and not answer.get("begun"):
                if "error" in answer:
                    raise ErrandFailed(answer["kind"], answer["error"])
                return answer
            if late:
                break
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await asyncio.wait({writing})  # or whoever has given up would still be asked for something
        folders.errand.unlink(missing_ok=True)
    raise ErrandFailed(
        "loop_timeout", f"waited {seconds:g} s for the training loop, which answers between two steps"
    )


def asked(folders: Folders) -> dict[str, Any] | None:
    """What is asked and not answered yet."""
    try:
        errand: dict[str, Any] = json.loads(folders.errand.read_bytes())
    except FileNotFoundError:
        return None
    return None if answered(folders).get("name") == errand["name"] else errand


def withdrawn(folders: Folders, errand: dict[str, Any]) -> bool:
    """Nobody waits for it any more."""
    try:
        return bool(json.loads(folders.errand.read_bytes())["name"] != errand["name"])
    except FileNotFoundError:
        return True


def answered(folders: Folders) -> dict[str, Any]:
    """The last answer; empty if there was none."""
    try:
        answer: dict[str, Any] = json.loads(folders.errand_done.read_bytes())
    except FileNotFoundError:
        return {}
    return answer


def begin(folders: Folders, errand: dict[str, Any]) -> None:
    """Say that it is being done, so that others may join in."""
    write_json(folders.errand_done, {"name": errand["name"], "begun": True, "version": errand["version"]})


def begun(folders: Folders) -> int | None:
    """The version of what is being done right now."""
    last = answered(folders)
    return last["version"] if last.get("begun") and folders.errand.exists() else None


def answer(folders: Folders, errand: dict[str, Any], **told: Any) -> None:
    """Say that it is done, or with `error` and `kind` why not."""
    write_json(folders.errand_done, {"name": errand["name"], **told})
