"""The unit of systemd: checked by systemd's own tools, and run by a real one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_for
from tests.systemd import Systemd

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "mount" / "systemd"
KVFS = "/usr/local/bin/kvfs"


class Service:
    """kvfs@.service for a mount point below `at`, as `kvfs setup` installs it."""

    def __init__(self, systemd: Systemd, at: Path) -> None:
        self.at = at
        self.systemd = systemd
        self.path = at / "kv-1"  # its name has an escape
        self.name = self.systemd.run("systemd-escape", "--path", self.path)
        self.unit = f"kvfs@{self.name}.service"
        self.said = at / "said"
        self.nvme = at / "nvme"
        self.options = f"ram=64M,nvme={self.nvme},nvme_size=512M,log={at}/kv.log"

    def install(self) -> None:
        self.setup(self.path)
        self.configure()

    def setup(self, word: str | Path) -> str:
        # Not the helper: /sbin is the machine's own.
        kvfs = (f"PYTHONPATH={ROOT}", ROOT / ".venv" / "bin" / "kvfs")
        return self.systemd.run("env", *kvfs, "setup", "--only", "service", word)

    def configure(self, *settings: str) -> None:
        """Write `options`, and additional settings of the unit for this test."""
        told = ["[Service]", "RestartSec=0", f"StandardOutput=append:{self.said}", *settings]
        self._write(f"/etc/systemd/system/{self.unit}.d/test.conf", *told)
        self._write(f"/etc/kvfs{self.path}.conf", f"OPTIONS='{self.options}'", f"PYTHONPATH={ROOT}")
        self.systemd.systemctl("daemon-reload")

    def _write(self, path: str, *lines: str) -> None:
        text = self.at / "text"
        text.write_text("".join(f"{line}\n" for line in lines))
        self.systemd.run("install", "-D", "-m", "0600", text, path)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.systemd.run("env", f"PYTHONPATH={ROOT}", KVFS, "status", "--json", self.path)
        )
        return found

    def show(self, name: str) -> str:
        return self.systemd.show(self.unit, name)

    def kill(self, pid: int) -> None:
        """Kill a process by its number in the service's namespace."""
        self.systemd.run("kill", "-KILL", str(pid))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    systemd = Systemd(tmp_path)
    try:
        made = Service(systemd, tmp_path)
        made.install()
        systemd.systemctl("start", made.unit, check=False)
        yield made
    finally:
        systemd.end()


def test_systemd_verifies_the_installed_units(service: Service) -> None:
    systemd = service.systemd
    units = Path("/etc/systemd/system")
    systemd.run("cp", UNITS / "mnt-kv.mount.sample", units / "mnt-kv.mount")
    drop = units / f"{service.unit}.d"
    systemd.run("cp", UNITS / "nvme.conf.sample", drop / "nvme.conf")
    for unit in (service.unit, "mnt-kv.mount"):
        # The manual pages are a part of `kvfs setup` that is not installed here.
        assert systemd.run("systemd-analyze", "verify", "--man=no", unit) == "", unit
    systemd.run(
        *("systemd-analyze", "security", "--offline=yes", "--threshold=50", service.unit)
    )  # of 100, for what must mount
    sample = (ROOT / "mount" / "fstab.sample").read_text()
    systemd.run("rm", units / "mnt-kv.mount")
    lines = [line.lstrip("#") for line in sample.splitlines() if "kvfs  /" in line]
    assert len(lines) == 3
    for line in lines:
        systemd.run("sh", "-c", f"echo '{line}' >/etc/fstab")
        command = ["systemd-analyze", "verify", "--generators=yes", "mnt-kv.mount"]
        assert systemd.run(*command) == "", line


def test_setup_remove_names_the_mount(service: Service) -> None:
    said = service.setup("--remove")
    assert f"kvfs setup: still mounted: {service.path}; unmount" in said
    assert "removed /etc/systemd/system/kvfs@.service" in said


def test_the_whole_machine_has_the_mount(service: Service) -> None:
    """The unit is hardened, with passthrough, and with all work of the keeper."""
    systemd = service.systemd
    assert service.show("ActiveState") == "active", service.said.read_text()
    assert f" {service.path} " in systemd.run("cat", "/proc/1/mountinfo")
    status = service.status()
    assert status["passthrough"]["on"], status["passthrough"]
    assert status["tiers"]["nvme"]["state"] == "healthy"
    keeper = service.show("MainPID")
    assert str(status["keeper_pid"]) == keeper
    assert "NoNewPrivs:\t1" in systemd.run("cat", f"/proc/{keeper}/status")

    systemd.run(
        "sh", "-c", f"head -c 9999999 /dev/urandom | tee {service.path}/a >{service.said}.a"
    )
    service.kill(status["daemon_pid"])
    systemd.run("cmp", service.path / "a", f"{service.said}.a")
    wait_for(lambda: service.status()["takeovers"] == 1, "another daemon serves")
    before = service.status()["daemon_pid"]
    systemd.systemctl("reload", service.unit)
    assert service.status()["daemon_pid"] != before
    systemd.run("cmp", service.path / "a", f"{service.said}.a")
    assert (service.show("MainPID"), service.show("NRestarts")) == (keeper, "0")
    wait_for(lambda: service.show("ActiveState") == "active", "it is reloaded")


def test_a_stop_writes_back_and_a_start_has_it(service: Service) -> None:
    systemd = service.systemd
    for number in range(4):
        systemd.run("sh", "-c", f"head -c 8000000 /dev/urandom >{service.path}/{number}.kv")
    said = systemd.run("sh", "-c", f"cd {service.path}; sha256sum *.kv")
    ram = service.status()["tiers"]["ram"]["path"]
    systemd.systemctl("stop", service.unit)
    assert (service.show("Result"), service.show("ActiveState")) == ("success", "inactive")
    assert f" {service.path} " not in systemd.run("cat", "/proc/1/mountinfo")
    assert f" {ram} " not in systemd.run("cat", "/proc/1/mountinfo")
    systemd.systemctl("start", service.unit)
    assert service.status()["objects"] == 4
    assert systemd.run("sh", "-c", f"cd {service.path}; sha256sum *.kv") == said


@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_a_keeper_that_dies_or_hangs_is_started_again(service: Service, how: str) -> None:
    """Its RAM tier is still there, with its objects."""
    systemd = service.systemd
    systemd.run("sh", "-c", f"echo before >{service.path}/a")
    if how == "STOP":
        service.configure("WatchdogSec=10")
        systemd.systemctl("restart", service.unit)
    systemd.run("kill", f"-{how}", service.show("MainPID"))
    wait_for(lambda: int(service.show("NRestarts")) > 0, "it is started again")
    wait_for(
        lambda: systemd.run("cat", service.path / "a", check=False) == "before", "it is served"
    )


def test_options_that_are_mended_need_no_other_start(service: Service) -> None:
    systemd = service.systemd
    systemd.systemctl("stop", service.unit)
    good = service.options
    service.options = "ram=64M,frobnicate=1"
    service.configure()
    assert "failed" in systemd.systemctl("start", service.unit, check=False)
    assert "kvfs: unknown option 'frobnicate'" in service.said.read_text()
    service.options = good
    service.configure()
    wait_for(lambda: service.show("ActiveState") == "active", "it is mounted")


def test_umount_by_hand_stops_the_service(service: Service) -> None:
    service.systemd.run("env", f"PYTHONPATH={ROOT}", KVFS, "umount", service.path)
    wait_for(lambda: service.show("ActiveState") == "inactive", "the service has ended")
    assert (service.show("Result"), service.show("NRestarts")) == ("success", "0")


def test_a_start_over_a_mount_by_hand_leaves_it_alone(service: Service) -> None:
    """The keeper refuses the mount point, and nothing is detached after it."""
    systemd = service.systemd
    systemd.systemctl("stop", service.unit)
    by_hand = ("env", f"PYTHONPATH={ROOT}", KVFS, "mount", "-o", service.options, service.path)
    systemd.run(*by_hand)
    keeper = service.status()["keeper_pid"]
    systemd.run("sh", "-c", f"echo kept >{service.path}/a")
    systemd.systemctl("start", service.unit, check=False)
    wait_for(lambda: service.show("NRestarts") != "0", "the start was refused and tried again")
    systemd.systemctl("stop", service.unit, check=False)
    assert service.status()["keeper_pid"] == keeper
    assert systemd.run("cat", service.path / "a") == "kept"
    systemd.run("env", f"PYTHONPATH={ROOT}", KVFS, "umount", service.path)
