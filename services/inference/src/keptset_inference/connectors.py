"""Keys and values that lie outside the engine, and whether an update of the weights reaches them.

A pause clears the engine's own cache and asks its connector to clear what that keeps. A connector that cannot
is not heard of: vLLM takes no answer for yes. What it kept was computed with the old weights, and the next
request with the same prompt would read it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import KVTransferConfig

from .errors import StartError

CLEARED = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
"""Connectors of vLLM's that keep what they get and forget it when they are told to."""
PASSES_ON = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
)
"""Those that bring a request's from one engine to another and keep nothing."""
SEVERAL = "MultiConnector"


def check_connectors(config: KVTransferConfig | None) -> None:
    """Refuse what would answer with the keys and values of other weights, where weights may change.

    Raises:
        StartError: names the connector.
    """
    if config is None or config.kv_connector is None:
        return
    for name in _names(
        config.kv_connector, config.kv_connector_module_path, config.kv_connector_extra_config
    ):
        if name not in (*CLEARED, *PASSES_ON):
            raise StartError(
                f"inference.vllm: the connector {name} may keep keys and values that were computed with old "
                "weights, and vLLM cannot have it forget them: leave it out, or inference.weights_dir, or "
                f"use one of {', '.join((*CLEARED, *PASSES_ON))}"
            )


def _names(name: str, module: str | None, more: Mapping[str, Any]) -> Iterator[str]:
    if module:
        yield f"{module}.{name}"  # whatever it is called, it is not vLLM's
    elif name != SEVERAL:
        yield name
    else:
        for part in more.get("connectors", ()):
            yield from _names(
                part["kv_connector"],
                part.get("kv_connector_module_path"),
                part.get("kv_connector_extra_config", {}),
            )


__all__ = ["CLEARED", "PASSES_ON", "check_connectors"]
