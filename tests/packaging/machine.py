"""A machine with a Debian of its own, in namespaces, for tests of installing.

Contract: its files are below `root`; its processes and mounts end with `end`. It has this machine's
kernel, devices and network. Not for services: it has no systemd (tests/systemd.py has).
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.harness import PATIENCE, wait_for

CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"  # pip's, where a proxy has one of its own
BOOT = """
umount --all --lazy --types fuse.kvfs # or their unmounts elsewhere would wait for this one
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
touch run/up
exec chroot . sleep infinity
"""


class Machine:
    """Running from the start, on the files of a tar archive."""

    def __init__(self, archive: Path, root: Path) -> None:
        self.root = root
        root.mkdir()
        subprocess.run(["tar", "--extract", "--file", archive, "--directory", root], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        if os.path.exists(f"/{CERTIFICATES}"):
            (root / CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(f"/{CERTIFICATES}", root / "tmp/certificates")
        enter = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private")
        self._process = subprocess.Popen(
            [*enter, "sh", "-euc", BOOT, "sh", root], stdin=subprocess.DEVNULL
        )
        wait_for(self._is_up, "the machine is up")

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"the machine ended: {self._process.returncode}"
        pid = self.pid
        return bool(pid) and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"

    @property
    def pid(self) -> int:
        """The number of its process 1 on this machine."""
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(children[0]) if children else 0

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a command there, with its output and errors together."""
        return subprocess.Popen(
            ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--root", "--wdns=/", *command],
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "DEBIAN_FRONTEND": "noninteractive",
                "PIP_CERT": "/tmp/certificates",
                "LC_ALL": "C.UTF-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command there as root, expect its exit code, and return what it prints."""
        process = self.start(*command)
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, f"{command}: {process.returncode}: {said}"
        return said.strip()

    def sh(self, script: str, code: int = 0) -> str:
        """Run a script of a shell there."""
        return self.run("sh", "-euc", script, code=code)

    def files(self) -> set[str]:
        """Every file of its own that has to do with kvfs."""
        names = "find / -xdev -path '*kvfs*' ! -path '/var/lib/dpkg/*' ! -path '/var/log/*'"
        return set(self.sh(f"{names} ! -path '/root/.cache/*'").splitlines())

    def end(self) -> None:
        """End all of it. The mounts go with their namespace."""
        if self._process.poll() is None and (pid := self.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        shutil.rmtree(self.root)
