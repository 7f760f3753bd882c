"""Waiting for services to become healthy."""

import time
from collections.abc import Callable, Mapping

import httpx

POLL = 0.2


def wait_healthy(
    urls: Mapping[str, str],
    timeout: float,
    check: Callable[[], None],
    on_wait: Callable[[dict[str, str], float], None],
    on_healthy: Callable[[str, float], None],
) -> dict[str, float]:
    """Polls GET {url}/health of every service until all answer 200; returns the seconds each took.

    `check` runs every round and raises if a process has died. `on_wait` gets what each missing service last
    said and the seconds so far, `on_healthy` a service that has just come up and its seconds. Raises
    TimeoutError that names those missing.
    """
    start = time.monotonic()
    missing = dict.fromkeys(urls, "no answer yet")
    took: dict[str, float] = {}
    with httpx.Client(timeout=2.0, trust_env=False) as client:
        while True:
            check()
            for name in list(missing):
                missing[name] = _ask(client, urls[name])
                if missing[name] == "healthy":
                    del missing[name]
                    took[name] = time.monotonic() - start
                    on_healthy(name, took[name])
            elapsed = time.monotonic() - start
            if not missing:
                return took
            if elapsed >= timeout:
                waited = "; ".join(f"{name} at {urls[name]} ({last})" for name, last in missing.items())
                raise TimeoutError(f"waited {elapsed:.0f} s for the health of {waited}")
            on_wait(dict(missing), elapsed)
            time.sleep(POLL)


def _ask(client: httpx.Client, url: str) -> str:
    try:
        answer = client.get(f"{url}/health")
    except httpx.ConnectError:
        return "not listening yet"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}"
    return "healthy" if answer.status_code == 200 else _reason(answer)


def _reason(answer: httpx.Response) -> str:
    """Why it is not healthy, in its own words if it has some."""
    try:
        return str(answer.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200].strip()}"
