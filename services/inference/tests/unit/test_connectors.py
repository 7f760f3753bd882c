"""Where weights may change, nothing keeps keys and values that cannot be made to forget them."""

import ast
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs

from keptset_inference import engine, server
from keptset_inference.connectors import CLEARED, PASSES_ON, check_connectors
from keptset_inference.errors import StartError
from keptset_settings import InferenceSettings


def config(name: str, **more) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)


def several(*names: str) -> KVTransferConfig:
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return config("MultiConnector", kv_connector_extra_config={"connectors": parts})


@pytest.mark.parametrize("name", [*CLEARED, *PASSES_ON])
def test_those_that_forget_or_keep_nothing_are_taken(name):
    check_connectors(None)
    check_connectors(config(name))
    check_connectors(several(name, CLEARED[0]))


def test_all_others_are_refused():
    others = KVConnectorFactory._registry.keys() - {*CLEARED, *PASSES_ON, "MultiConnector"}
    assert "LMCacheConnectorV1" in others
    for name in others:
        for given in (config(name), several(PASSES_ON[0], name)):
            with pytest.raises(StartError, match=rf"the connector {name} may keep.*weights_dir"):
                check_connectors(given)
    with pytest.raises(StartError, match=r"the connector mine\.NixlConnector may keep"):
        check_connectors(config("NixlConnector", kv_connector_module_path="mine"))


def test_the_names_are_vllms_and_those_that_forget_know_how():
    assert {*CLEARED, *PASSES_ON} <= KVConnectorFactory._registry.keys()
    for name in CLEARED:
        # not imported: some need what is not installed
        module = KVConnectorFactory._registry[name].__closure__[1].cell_contents
        tree = ast.parse(Path(find_spec(module).origin).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        assert "reset_cache" in {node.name for node in found.body if isinstance(node, ast.FunctionDef)}, name


async def test_an_engine_whose_weights_may_change_is_not_started_with_one(monkeypatch):
    resolved = SimpleNamespace(kv_transfer_config=config("LMCacheConnectorV1"))
    monkeypatch.setattr(engine, "resolved_config", lambda arguments, capture: resolved)
    with pytest.raises(StartError, match="LMCacheConnectorV1"):
        async with engine.running_engine(None, capture=None, mask_padded_ids=False, weights_change=True):
            pass


@pytest.mark.parametrize(
    ("changes", "change"),
    [({}, False), ({"weights_dir": "weights"}, True), ({"weights_transfer": "nccl"}, True)],
)
async def test_the_server_says_whether_they_may(monkeypatch, tmp_path, changes, change):
    said = []

    @asynccontextmanager
    async def running(arguments, **options):
        said.append(options["weights_change"])
        raise StartError("enough")
        yield

    monkeypatch.setattr(server, "engine_arguments", lambda settings: AsyncEngineArgs(settings.model))
    monkeypatch.setattr(server, "running_engine", running)
    settings = InferenceSettings(model=str(tmp_path), host="127.0.0.1", port=0, **changes)
    with pytest.raises(StartError, match="enough"):
        await server.serve(settings, None)
    assert said == [change]
