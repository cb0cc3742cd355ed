"""The chart: by helm, by the schemas of Kubernetes, and its command as a container.

There is no cluster here. mount/kubernetes/kvfs/README.md lists the checks that need a cluster.
tests/packaging runs the image.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfs import __version__
from kvfs.config import Config
from kvfs.daemon.pool import PORT
from tests.pool.servers import free_port, server

ROOT = Path(__file__).parents[2]
CHART = ROOT / "mount" / "kubernetes" / "kvfs"
BIN = Path(sys.executable).parent
VERSIONS = ("1.25", "1.29", "1.33")
MINIMAL: list[str] = []
EVERYTHING = [
    "nvme.hostPath=/mnt/data",
    "nvme.size=1T",
    "s3.url=s3://bucket/kv",
    "s3.endpoint=https://10.0.0.1:9000",
    "s3.region=here",
    "s3.secretName=bucket",
    r"pool.url=redis+cluster://a:6379\,b:6379/kv",
    "pool.secretName=index",
    "pool.tlsSecretName=certificates",
    "extraOptions={promote_after=3,reclaimable=30%}",
    "metrics.serviceMonitor.enabled=true",
    "metrics.serviceMonitor.labels.release=prometheus",
    "metrics.prometheusRule.enabled=true",
    "nodeSelector.gpu=yes",
    "tolerations[0].operator=Exists",
    "imagePullSecrets[0].name=pull",
    "podAnnotations.a=b",
    "podLabels.c=d",
    "serviceAccount.annotations.role=kv",
    "image.tag=1.2.3",
]
NAMESPACES = '[namespace."vllm-*"]\nquota_hard = "500G"\n'


def helm(*arguments: str | Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [BIN / "helm", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def rendered(values: list[str]) -> dict[str, dict[str, Any]]:
    """The rendered objects, by kind."""
    told = [word for value in values for word in ("--set", value)]
    told += ["--set-literal", f"namespaces={NAMESPACES}"] if values is EVERYTHING else []
    text = helm("template", "a", CHART, "--namespace", "cache", *told).stdout
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def container(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    containers = found["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    one: dict[str, Any] = containers[0]
    return one


def test_helm_finds_no_fault() -> None:
    done = helm("lint", "--strict", CHART)
    assert "[WARNING]" not in done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize(
    "value",
    [
        *("nvme.hostPath=data", "rma=64G", "s3.url=http://bucket", "ram=64Q", "ram=much"),
        *("nvme.size=5X", "pool.url=http://redis/kv", "pool.url=redis://redis"),
        *("pool.url=redis://:secret@redis/kv", "pool.allow=everybody"),
    ],
)
def test_values_that_make_no_sense_are_refused(value: str) -> None:
    done = helm("template", "a", CHART, "--set", value, check=False)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize(
    ("ram", "limit", "fits"),
    [
        *(("64G", "18Gi", False), ("16G", "16Gi", False), ("16G", "17G", False)),
        *(("16G", "17.5G", True), ("16GiB", "18Gi", True), ("512M", "1Gi", True)),
        *(("17179869184", "18Gi", True), ("19327352832", "18Gi", False), ("1T", "2Ti", True)),
    ],
)
def test_ram_is_less_than_the_memory_of_the_pod(ram: str, limit: str, fits: bool) -> None:  # noqa: FBT001
    told = ["--set", f"ram={ram}", "--set", f"resources.limits.memory={limit}"]
    done = helm("template", "a", CHART, *told, check=False)
    assert (done.returncode == 0) is fits, done.stderr
    assert fits or f"resources.limits.memory={limit}: the RAM tier is memory" in done.stderr


@pytest.mark.parametrize("values", [MINIMAL, EVERYTHING], ids=["minimal", "everything"])
def test_rendered_chart_is_valid_for_kubernetes(values: list[str], tmp_path: Path) -> None:
    found = rendered(values)
    of_kubernetes = {"v1", "apps/v1", "scheduling.k8s.io/v1", "networking.k8s.io/v1"}
    own = {kind for kind, made in found.items() if made["apiVersion"] in of_kubernetes}
    assert own >= {"DaemonSet", "Service", "ServiceAccount"}
    for kind in own:
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(found[kind]))
    for version in VERSIONS:
        command = (BIN / "kubernetes-validate", "--strict", f"--kubernetes-version={version}")
        files = [tmp_path / f"{kind}.yaml" for kind in own]
        done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_are_those_of_the_document(tmp_path: Path) -> None:
    found = rendered(EVERYTHING)
    spec = found["PrometheusRule"]["spec"]
    rules = yaml.safe_load((ROOT / "mount" / "observe" / "kvfs.rules.yml").read_text())
    assert spec == rules
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], check=True)
    monitor = found["ServiceMonitor"]["spec"]
    labels = found["Service"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == "kvfs", "the job that the rules ask for"
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["name"] for port in found["Service"]["spec"]["ports"]]
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ports


def test_rendered_chart_has_no_credential() -> None:
    one = container(rendered(EVERYTHING))
    assert one["envFrom"] == [{"secretRef": {"name": name}} for name in ("bucket", "index")]
    assert {variable["name"] for variable in one["env"]} == {"POD_IP", "MOUNTPOINT", "OPTIONS"}


def options(found: dict[str, dict[str, Any]]) -> Config:
    """The options of the container, as kvfs reads them in a pod with the address 10.0.0.7."""
    env = container(found)["env"]
    names = [variable["name"] for variable in env]
    assert names[-1] == "OPTIONS", "Kubernetes expands only what stands before it"
    text = env[-1]["value"].replace("$(POD_IP)", "10.0.0.7")
    return Config.from_options(Path("/mnt/kvfs/kv"), text)


def test_pool_is_one_value() -> None:
    found = rendered(["pool.url=redis://redis:6379/kv"])
    config = options(found)
    assert str(config.pool_place) == "redis://redis:6379/kv"
    assert config.pool_address == "10.0.0.7"
    private = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
    assert config.pool_networks == private
    assert not config.pool_required
    assert "envFrom" not in container(found)
    policy = found["NetworkPolicy"]["spec"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    chosen = policy["podSelector"]["matchLabels"]
    assert chosen.items() <= labels.items()
    peers, everybody = policy["ingress"]
    assert peers == {
        "from": [{"podSelector": {"matchLabels": chosen}}],
        "ports": [{"port": "pool"}],
    }
    assert everybody == {"ports": [{"port": "metrics"}]}
    ports = {port["name"]: port["containerPort"] for port in container(found)["ports"]}
    assert ports == {"metrics": 9095, "pool": PORT}


def test_pool_with_certificates() -> None:
    found = rendered(EVERYTHING)
    config = options(found)
    assert config.pool_place is not None
    assert [host for host, _ in config.pool_place.hosts] == ["a", "b"]
    (at,) = (
        one for one in container(found)["volumeMounts"] if one["mountPath"] == str(config.pool_tls)
    )
    volumes = found["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
    (volume,) = (one for one in volumes if one["name"] == at["name"])
    assert volume["secret"]["secretName"] == "certificates"
    paths = {item["path"] for item in volume["secret"]["items"]}
    assert paths == {"ca.pem", "cert.pem", "key.pem"}


def test_without_a_pool_nothing_is_of_it() -> None:
    assert "NetworkPolicy" not in rendered(MINIMAL)
    assert "pool" not in yaml.safe_dump(rendered(["pool.secretName=a", "pool.tlsSecretName=b"]))


def test_pool_that_everybody_could_read_is_refused() -> None:
    told = ["--set", "pool.url=redis://redis/kv", "--set", "pool.allow="]
    done = helm("template", "a", CHART, *told, check=False)
    assert done.returncode != 0
    assert "pool.url without pool.allow" in done.stderr


def test_pods_go_to_nodes_with_gpus_and_are_not_preempted() -> None:
    """GKE admits system-node-critical in kube-system only, so the chart has a class of its own."""
    found = rendered(MINIMAL)
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    priority = found["PriorityClass"]
    assert spec["priorityClassName"] == priority["metadata"]["name"] == "cache-a-kvfs"
    assert priority["value"] == 10**9, "the highest that is not the system's"

    given = rendered(["priorityClass.create=false", "priorityClass.name=gold"])
    assert "PriorityClass" not in given
    spec = given["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "gold"


ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# In a mount namespace: its root is read-only, and it has the directories of the chart's volumes.
CONTAINER = """
set -eu
mount --make-rprivate /
umount -al --types fuse.kvfs
for volume in /mnt /run /tmp /var/log; do mount -t tmpfs tmpfs $volume; done
mkdir /mnt/kvfs /mnt/data /run/kvfs-ram /var/log/kvfs
mount -o remount,bind,ro /
until_it_answers() {
    until $PROBE >/run/status 2>&1; do kill -0 $1 || { cat /var/log/kvfs/*; exit 1; }; done
}
"$@" & one=$!
until_it_answers $one
echo kept >$MOUNTPOINT/a
daemon=$(sed -n 's/.*"daemon_pid": \\([0-9]*\\).*/\\1/p' /run/status)
kill -KILL $one $daemon
wait $one || true
while ! "$@"; do :; done & two=$! # as kubelet starts it again
until_it_answers $two
grep -qx kept $MOUNTPOINT/a
until kvfs pool --json $MOUNTPOINT | grep -q '"serves": true'; do kill -0 $two; done
$STOP
wait $two
if mountpoint -q $MOUNTPOINT; then exit 1; fi
echo done
"""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The index of a pool."""
    port = free_port()
    with server(tmp_path / "index", port):
        yield f"redis://127.0.0.1:{port}/kv"


def test_the_container_runs_is_killed_comes_again_and_stops(index: str) -> None:
    """The container gets the chart's command and arguments, on a read-only root."""
    own = ["nvme.hostPath=/mnt/data", "nvme.size=256M", "ram=32M", f"pool.url={index}"]
    one = container(rendered(own))
    told = {variable["name"]: variable.get("value", "") for variable in one["env"]}
    options = told["OPTIONS"].replace("metrics=0.0.0.0:9095", "metrics=/run/metrics")
    options = options.replace("$(POD_IP)", f"127.0.0.1:{free_port()}")
    probe = one["startupProbe"]["exec"]["command"]
    assert one["readinessProbe"]["exec"]["command"] == probe
    assert one["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    done = subprocess.run(
        [*ALONE, "sh", "-c", CONTAINER, "sh", *one["command"]],
        env={
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MOUNTPOINT": told["MOUNTPOINT"],
            "OPTIONS": options,
            "PROBE": shlex.join([*probe, "--json"]),
            "STOP": shlex.join(one["lifecycle"]["preStop"]["exec"]["command"]),
        },
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("done\n"), done.stdout
