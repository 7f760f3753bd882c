"""The dashboard asks for metrics that the services export, and Prometheus for services that there are."""

import importlib.util
import json
import re
from pathlib import Path

import httpx
import pytest
import yaml

from keptset_orchestrator.app import make_app
from keptset_orchestrator.progress import Progress
from keptset_trainer.prometheus import registry_of

MONITORING = Path(__file__).parents[1]
ROOT = MONITORING.parents[1]
DASHBOARD = json.loads((MONITORING / "dashboards" / "keptset.json").read_text())
ROW = """
reward/mean reward/min reward/max mismatch_kl/mean mismatch_kl/max ratio/mean ratio/max_abs_log
kept/coverage kept/size_mean kept/size_p50 kept/size_p99 kept/singleton_share kept/mass_mean
entropy/full entropy/kept loss grad_norm lr rejected/sequences clipped/tokens tokens/loss tokens/total
rollout/error_rate rollout/trainable_share rollout/tokens rollout/length_mean rollout/truncated_share
seconds/rollout seconds/train seconds/weights seconds/step weight_version
"""
"""What tests/e2e/test_short_run.py finds in every row of a run."""


class EmptySpool:
    """A trainer that has trained nothing."""

    next_step = 1

    def look_for_results(self) -> int:
        return 0

    def result(self, step: int) -> None:
        return None


async def orchestrator_metrics() -> str:
    progress = Progress(steps=1, row=dict.fromkeys(ROW.split(), 0.5))
    transport = httpx.ASGITransport(app=make_app(progress))
    async with httpx.AsyncClient(transport=transport, base_url="http://orchestrator") as client:
        return (await client.get("/metrics")).text


def asked() -> set[str]:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return {name for text in expressions for name in re.findall(r"\b(?:keptset_|vllm:)\w+", text)}


async def test_every_metric_of_ours_is_exported():
    text = await orchestrator_metrics()
    exported = set(re.findall(r"^(\w+)[ {]", text, re.MULTILINE))
    exported |= {family.name for family in registry_of(EmptySpool()).collect()}
    wanted = {name for name in asked() if name.startswith("keptset_")}
    assert len(wanted) > 20
    assert wanted <= exported


def test_every_metric_of_vllm_is_exported():
    package = importlib.util.find_spec("vllm")  # importing it would take longer than all the rest
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    wanted = {name.removesuffix("_total") for name in asked() if name.startswith("vllm:")}
    assert len(wanted) > 2
    assert not [name for name in wanted if f'"{name}"' not in source]


def test_panels_have_their_own_place():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert (place["x"], place["y"]) not in taken
        taken.add((place["x"], place["y"]))


def test_prometheus_asks_the_services_of_the_project():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    targets = [t for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]]
    for target in targets:
        name, port = target.split(":")
        run = services[name]["environment"]
        assert run[f"KEPTSET_{name.upper()}__PORT"] == port
    assert len(targets) == 3


@pytest.mark.parametrize("volume", ["prometheus", "grafana"])
def test_mounted_files_are_there(volume):
    override = yaml.safe_load((ROOT / "deploy" / "compose.monitoring.yml").read_text())
    for mount in override["services"][volume]["volumes"]:
        source = mount.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).exists(), source
