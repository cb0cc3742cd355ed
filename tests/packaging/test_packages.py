"""The wheel, the Debian package and the image, on machines that have nothing of kvfs.

One file: what it builds is built once. There is no registry and no cluster here; the image runs as
the chart's privileged container.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE, wait_for
from tests.mount.test_kubernetes import container, rendered
from tests.packaging.machine import Machine

# The first test waits for what all of them need.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OPTIONS = "ram=64M,nvme=/data/kvfs,nvme_size=256M"
NEXT = "0.1.0+1"
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("SYS_ADMIN", "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE"),
)


def build(script: str, *arguments: str | Path, **environment: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / script, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what is built."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def wheel(made: Path) -> Path:
    build("build-wheel.sh", made, PYTHON="/usr/bin/python3")
    (found,) = made.glob("kvfs-*.whl")
    return found


@pytest.fixture(scope="module")
def deb(made: Path, wheel: Path) -> Path:
    build("build-deb.sh", "--wheel", wheel, made)
    (found,) = made.glob("kvfs_*.deb")
    return found


@pytest.fixture(scope="module")
def base(made: Path) -> Path:
    """The smallest Debian that has apt."""
    archive = made / "base.tar"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=apt", "--include=mount", release(), archive],
        check=True,
    )
    return archive


def release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, text = line.partition("=")
        if name == "VERSION_CODENAME":
            return text
    raise LookupError("/etc/os-release has no VERSION_CODENAME")


@pytest.fixture
def machine(base: Path, tmp_path: Path) -> Iterator[Machine]:
    one = Machine(base, tmp_path / "machine")
    try:
        yield one
    finally:
        one.end()


def give(machine: Machine, file: Path) -> str:
    """Copy a file to the machine's /tmp."""
    (machine.root / "tmp" / file.name).write_bytes(file.read_bytes())
    return f"/tmp/{file.name}"


def mounted_and_used(machine: Machine) -> dict[str, Any]:
    """Mount with mount(8), write a file and read it back; the status."""
    machine.sh("mkdir -p /mnt/kv /data")
    machine.run("mount", "-t", "kvfs", "kvfs", "/mnt/kv", "-o", OPTIONS)
    machine.sh("head -c 9000000 /dev/urandom >/tmp/bytes; cp /tmp/bytes /mnt/kv/a")
    machine.sh("cmp /tmp/bytes /mnt/kv/a")
    found = status_of(machine)
    assert found["passthrough"]["on"], found["passthrough"]
    return found


def status_of(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.run("kvfs", "status", "--json", "/mnt/kv"))
    return found


def test_a_wheel_needs_no_compiler_and_setup_makes_it_known(machine: Machine, wheel: Path) -> None:
    machine.sh(
        "apt-get update -qq; apt-get install -qq --no-install-recommends python3-venv man-db"
    )
    before = machine.files()
    machine.sh(f"python3 -m venv /opt/env; /opt/env/bin/pip install -q {give(machine, wheel)}")
    machine.run("/opt/env/bin/kvfs", "setup", "/mnt/kv")
    assert machine.sh("command -v cc pkg-config || true") == ""
    mounted_and_used(machine)
    for page in ("kvfs", "kvfs-mount", "kvfs-ns", "mount.kvfs"):
        assert "SYNOPSIS" in machine.run("man", page)
    completion = machine.run("cat", "/usr/local/share/bash-completion/completions/kvfs")
    assert "_KVFS_COMPLETE=bash_complete" in completion
    for shared in (
        "mount/observe/kvfs.rules.yml",
        "mount/observe/kvfs.grafana.json",
        "mount/kubernetes/kvfs/Chart.yaml",
        "docs/operating.md",
        "docs/images/page.png",
        "README.md",
    ):
        machine.run("test", "-s", f"/usr/local/share/kvfs/{shared}")
    assert machine.run("/opt/env/bin/kvfs", "setup") == "nothing to change"
    doctor = machine.run("kvfs", "doctor", "--json")
    verdicts = {check["name"]: check["verdict"] for check in json.loads(doctor)["checks"]}
    assert verdicts["libfuse"] == "ok", "the wheel has its own"
    machine.run("kvfs", "umount", "/mnt/kv")
    machine.run("/opt/env/bin/kvfs", "setup", "--remove")
    machine.sh("rm -r /opt/env /data /tmp/kvfs* /etc/kvfs")
    assert machine.files() == before


def test_a_package_installs_upgrades_under_load_and_goes(
    machine: Machine, wheel: Path, deb: Path, made: Path
) -> None:
    before = machine.files()
    machine.sh("ln -s /opt/env/bin/kvfs /usr/local/bin/kvfs")
    said = machine.sh(
        f"apt-get update -qq; apt-get install -qq --no-install-recommends {give(machine, deb)}"
    )
    assert "kvfs: /usr/local/bin/kvfs of a wheel hides /usr/bin/kvfs: run" in said, said
    machine.sh("rm /usr/local/bin/kvfs")
    status = mounted_and_used(machine)
    keeper = status["keeper_pid"]
    machine.run("test", "-s", "/usr/share/doc/kvfs/docs/operating.md")
    before_setup = machine.files()
    said = machine.run("kvfs", "setup", "/mnt/kv")
    assert said.startswith("the Debian package kvfs has made this kvfs known"), said
    assert machine.files() - before_setup == {"/etc/kvfs/mnt", "/etc/kvfs/mnt/kv.conf"}
    said = machine.run("kvfs", "setup", "--remove", code=2)
    assert "apt remove kvfs" in said, said
    load = machine.start(
        "python3", give(machine, Path(__file__).with_name("load.py")), "/mnt/kv", "/tmp/stop"
    )
    wait_for((machine.root / "tmp/stop.begun").exists, "the load has begun")

    build("build-deb.sh", "--version", NEXT, "--wheel", wheel, made)
    (second,) = made.glob(f"kvfs_{NEXT}_*.deb")
    machine.sh(f"apt-get install -qq {give(machine, second)}")
    status = status_of(machine)
    assert status["keeper_pid"] == keeper
    words = machine.sh(f"tr '\\0' ' ' </proc/{status['daemon_pid']}/cmdline")
    assert words.startswith(f"/usr/lib/kvfs/{NEXT}/bin/python3 "), words
    assert machine.run("ls", "-A", "/usr/lib/kvfs") == NEXT
    machine.run("cmp", "/tmp/bytes", "/mnt/kv/a")

    machine.sh(f"kill -KILL {status['daemon_pid']}")
    successor = NEXT + ": another daemon serves"
    wait_for(lambda: status_of(machine)["daemon_pid"] != status["daemon_pid"], successor)
    machine.sh(": >/tmp/stop")
    told = json.loads(load.communicate()[0])
    print(told)
    assert told["failures"] == []
    assert told["done"] > 100

    said = machine.sh("exec 3</mnt/kv/a; apt-get remove -qq kvfs", code=100)
    assert "kvfs: /mnt/kv is as before; end the cause, then run: kvfs umount /mnt/kv" in said, said
    machine.run("cmp", "/tmp/bytes", "/mnt/kv/a")
    machine.run("apt-get", "remove", "-qq", "kvfs")
    said = machine.run("apt-get", "purge", "-qq", "kvfs")
    assert "kvfs: /etc/kvfs stays, with the options of mounts" in said, said
    machine.sh("! mountpoint -q /mnt/kv; rm -rf /data /tmp/kvfs* /etc/kvfs; apt-get -qq clean")
    assert machine.files() == before


# As a runtime of Kubernetes: $HOST/kvfs is a shared mount of the node, and the container is started
# on it, asked by its probe, used from outside, and stopped as kubelet does.
NODE = """
umount --all --lazy --types fuse.kvfs # or their unmounts elsewhere would wait for this one
umount -lR /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup # crun takes no mixture of versions 1 and 2
mount -t tmpfs tmpfs $HOST
mount --make-shared $HOST
mkdir $HOST/kvfs $HOST/memory $HOST/log
crun() { command crun --root $HOST/crun --cgroup-manager disabled "$@"; }
crun run --bundle $BUNDLE kvfs & one=$!
until crun exec kvfs $PROBE >$HOST/status 2>&1; do
    kill -0 $one || { cat $HOST/status $HOST/log/*; exit 1; }
done
head -c 9000000 /dev/urandom >$HOST/bytes
cp $HOST/bytes $HOST/kvfs/kv/a
cmp $HOST/bytes $HOST/kvfs/kv/a
cat $HOST/status
crun exec kvfs sh -c 'nginx -v && /usr/lib/kvfs/*/bin/python3 -c "import hiredis, redis"'
crun exec kvfs $STOP
wait $one
if mountpoint -q $HOST/kvfs/kv; then exit 1; fi
echo done
"""


def test_the_image_runs_as_the_privileged_container(deb: Path, made: Path, tmp_path: Path) -> None:
    archive, layout, bundle = made / "image.tar", tmp_path / "layout", tmp_path / "bundle"
    build("build-image.sh", "--deb", deb, "--tag", "test", archive)
    layout.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", layout], check=True)
    unpack = ("umoci", "unpack", "--image", f"{layout}:test", bundle)
    subprocess.run(unpack, check=True, stdout=subprocess.DEVNULL)
    one = container(rendered(["ram=64M"]))
    host = tmp_path / "host"
    host.mkdir()
    config = json.loads((bundle / "config.json").read_text())
    assert config["process"]["args"] == ["kvfs"]
    (bundle / "config.json").write_text(json.dumps(privileged(config, one, host)))
    done = subprocess.run(
        ["unshare", "--mount", "--propagation=private", "sh", "-euc", NODE],
        env=os.environ
        | {"HOST": str(host), "BUNDLE": str(bundle)}
        | {"PROBE": shlex.join([*one["startupProbe"]["exec"]["command"], "--json"])}
        | {"STOP": shlex.join(one["lifecycle"]["preStop"]["exec"]["command"])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("done\n"), done.stdout
    assert '"version": "' in done.stdout


def privileged(config: dict[str, Any], one: dict[str, Any], host: Path) -> dict[str, Any]:
    """The configuration of the runtime for the chart's container."""
    assert one["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    process = config["process"]
    del process["rlimits"]  # those of the node
    every = [f"CAP_{name}" for name in CAPABILITIES]
    process |= {
        "args": one["command"],
        "terminal": False,
        "noNewPrivileges": False,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), every),
        "env": [
            *process["env"],
            *(
                f"{variable['name']}={variable['value'].replace('0.0.0.0:9095', '/run/metrics')}"
                for variable in one["env"]
            ),
        ],
    }
    paths = {
        "mount": [bind(host / "kvfs", "/mnt/kvfs", "rshared")],
        "memory": [bind(host / "memory", "/run/kvfs-ram", "rshared")],
        "run": [{"destination": "/run", "type": "tmpfs", "source": "tmpfs"}],
        "log": [bind(host / "log", "/var/log/kvfs", "rprivate")],
        "tmp": [{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}],
    }
    volumes = {volume["name"]: volume["mountPath"] for volume in one["volumeMounts"]}
    assert volumes.keys() == paths.keys()
    kept = [each for each in config["mounts"] if each["destination"] in {"/proc", "/sys"}]
    order = ("run", "mount", "memory", "log", "tmp")
    config["mounts"] = [
        *kept,
        bind(Path("/dev"), "/dev", "rslave"),
        *(each for name in order for each in paths[name]),
    ]
    config["root"]["readonly"] = True
    del config["hostname"]  # it shares the namespaces of the node, but for its mounts
    linux = config["linux"]
    config["linux"] = {
        "namespaces": [each for each in linux["namespaces"] if each["type"] == "mount"],
        "rootfsPropagation": "rshared",
    }
    return config


def bind(source: Path, destination: str, propagation: str) -> dict[str, Any]:
    options = ["rbind", "rw", propagation]
    return {
        "destination": destination,
        "type": "bind",
        "source": str(source),
        "options": options,
    }
