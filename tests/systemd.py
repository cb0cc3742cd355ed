"""A real systemd as process 1 of namespaces of its own, for tests of units.

Contract: it has this machine's files, but its writes to /etc, /mnt, /usr/local, /run and /var/log
stay its own. None of this machine's services are among its units. `end` ends all of it.
"""

import os
import signal
import subprocess
from pathlib import Path

from kvfs import runtime
from tests.harness import PATIENCE, wait_for

BOOT = r"""
mount --make-rprivate /
umount -al --types fuse.kvfs # or their unmounts elsewhere would wait for this one
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system
mount -t tmpfs tmpfs /mnt
for own in /etc /usr/local /var/log; do
    mkdir -p "$1/own$own" "$1/work$own"
    mount -t overlay -o "lowerdir=$own,upperdir=$1/own$own,workdir=$1/work$own" overlay "$own"
done
: >/etc/fstab
mkdir "$1/units"
cp /lib/systemd/system/*.target "$1/units"
mount --bind "$1/units" /lib/systemd/system
if mountpoint -q /sys/fs/cgroup; then umount -lR /sys/fs/cgroup; fi
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount --make-rshared /
exec env -i PATH="$PATH" container=test SYSTEMD_LOG_TARGET=console \
    /lib/systemd/systemd --system --unit=basic.target
"""


class Systemd:
    """Running from the start; `at` is a directory for what it writes."""

    def __init__(self, at: Path) -> None:
        hierarchy = next(
            Path(mount.path) for mount in runtime.mounts() if mount.fstype == "cgroup2"
        )
        self.group = hierarchy / f"kvfs-test-{os.getpid()}"
        self.group.mkdir()
        self.console = at / "console"
        namespaces = ["--cgroup", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"]
        enter = f'echo $$ >{self.group}/cgroup.procs; exec unshare {" ".join(namespaces)} "$@"'
        with self.console.open("wb") as console:
            self.process = subprocess.Popen(
                ["sh", "-ec", enter, "sh", "sh", "-euc", BOOT, "sh", at],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        try:
            wait_for(self._running, "systemd is running")
        except BaseException:
            print(self.console.read_text())
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The number of its process 1 on this machine."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(children[0]) if children else 0

    def _running(self) -> bool:
        assert self.process.poll() is None, self.console.read_text()
        if not self.pid or Path(f"/proc/{self.pid}/comm").read_text() != "systemd\n":
            return False
        # Degraded: a unit that this machine's generators have made cannot be started here.
        return self.systemctl("is-system-running", check=False) in {"running", "degraded"}

    def run(self, *command: str | Path, check: bool = True) -> str:
        """Run as root of that machine; return standard output and errors together, stripped."""
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--all", "--wdns=/", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout.strip()

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", *arguments, check=check)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def end(self) -> None:
        """End process 1, and all others with it; the last one takes the mounts along."""
        if self.process.poll() is None and (pid := self.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        events = self.group / "cgroup.events"
        wait_for(lambda: "populated 0" in events.read_text(), "all processes are gone")
        for path, _, _ in os.walk(self.group, topdown=False):
            os.rmdir(path)
