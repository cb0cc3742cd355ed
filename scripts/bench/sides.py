"""Fresh directories of one kind: a kvfs mount, a bare tmpfs, a disk, and libfuse's passthrough_hp.

Contract: each side is made for one turn and removed after it, so the turn begins with the first
file. The tmpfs of `tmpfs` and of `passthrough_hp` has the options of kvfs's own RAM tier, which
`Sides.prepare` reads from a mount. passthrough_hp is an example of libfuse, in C++. With FUSE
passthrough it shows what FUSE costs a file system that does nothing else. A passthrough_hp whose
daemon carries the bytes itself is refused: it would be a wrong peer.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.mounted import Failed, Mounted, command, cpu_seconds, is_mounted, kvfs, scratch

KVFS, PEER, TMPFS, DISK = "kvfs", "passthrough_hp", "tmpfs", "disk"
FOLDER = "engine"
MOUNT_LIMIT_S = 10.0
POLL_S = 0.005
BLOCK = 8 << 20
PROBE = 512 << 20  # bytes; a daemon that carries them needs more than 100 ms
PROBE_CPU_S = 0.05


@dataclass
class Sides:
    """The compared sides. `disk`: a directory of the NVMe tier's file system; `peer`: a program."""

    disk: Path
    ram: int
    options: list[str]
    peer: Path | None
    tmpfs_options: str = ""
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [KVFS, *([PEER] if self.peer else []), TMPFS, DISK]

    def prepare(self) -> None:
        """Read the tmpfs options of a RAM tier; check that both FUSE sides pass bytes through."""
        with self._kvfs() as mounted:
            self.status = mounted.status()
            tier = self.status["tiers"]["ram"]["path"]
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                fields = line.split()
                if fields[4] == tier:
                    self.tmpfs_options = fields[-1].removeprefix("rw,")
        if not self.tmpfs_options:
            raise Failed(f"{tier} is no tmpfs of its own: run the benchmark as root")
        if self.peer:
            with self.tmpfs() as source:
                check_peer(self.peer, source)

    @contextlib.contextmanager
    def make(self, name: str, profile: str) -> Iterator[tuple[Path, Mounted | None]]:
        """A fresh directory of a side, and its mount if kvfs makes one.

        In kvfs it is a namespace for a connector: of `kvfs ns create --for PROFILE`.
        """
        with contextlib.ExitStack() as stack:
            if name == KVFS:
                mounted = stack.enter_context(self._kvfs())
                folder = mounted.path / FOLDER
                if profile:
                    command("ns", "create", str(folder), "--for", profile)
                else:
                    folder.mkdir()
                mounted.settle()  # an engine starts later than its mount
                yield folder, mounted
                return
            if name == DISK:
                yield _folder(stack.enter_context(scratch(self.disk))), None
                return
            root = stack.enter_context(self.tmpfs())
            if name == PEER and self.peer:
                root = stack.enter_context(passthrough(self.peer, root))[0]
            yield _folder(root), None

    @contextlib.contextmanager
    def tmpfs(self) -> Iterator[Path]:
        """A tmpfs as that of kvfs's RAM tier."""
        with scratch() as folder:
            where = ["-t", "tmpfs", "-o", self.tmpfs_options, "kvfs-bench", str(folder)]
            subprocess.run(["mount", *where], check=True)
            try:
                yield folder
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=True)

    @contextlib.contextmanager
    def _kvfs(self) -> Iterator[Mounted]:
        with scratch() as folder, scratch(self.disk) as disk:
            options = [f"ram={self.ram}", f"nvme={disk}/kvfs", f"nvme_size={2 * self.ram}"]
            with kvfs(folder / "mount", ",".join([*options, *self.options])) as mounted:
                mounted.require("passthrough", on=True)
                yield mounted


def warm(tmpfs: Path, count: int) -> None:
    """Write bytes and unlink them, so that no side pays for what the machine gets from its host.

    A virtual machine's host takes free memory back within seconds. The first touch of each huge
    page then costs a write some 90 % of its speed. posix_fallocate would not touch the pages.
    """
    block = bytes(BLOCK)
    paths = [tmpfs / str(at) for at in range(-(-count // BLOCK))]
    for path in paths:
        path.write_bytes(block)
    for path in paths:
        path.unlink()


def _folder(root: Path) -> Path:
    """Users give each engine a directory of its own."""
    folder = root / FOLDER
    folder.mkdir()
    return folder


def check_peer(peer: Path, source: Path) -> None:
    """Raise Failed if the daemon of passthrough_hp carries the bytes of a tmpfs itself."""
    probe, block = source / "probe", bytes(1 << 20)
    with probe.open("wb") as file:
        for _ in range(PROBE // len(block)):
            file.write(block)
    with passthrough(peer, source) as (mount, pid):
        before = cpu_seconds(pid)
        with (mount / "probe").open("rb", buffering=0) as file:
            while file.read(len(block)):
                pass
        spent = cpu_seconds(pid) - before
    probe.unlink()
    if spent > PROBE_CPU_S:
        raise Failed(
            f"{peer}: its daemon used {spent:.2f} s of processor time for a read of "
            f"{PROBE >> 20} MiB, so FUSE passthrough is off: use Linux 6.9 or later, as root"
        )


@contextlib.contextmanager
def passthrough(peer: Path, source: Path) -> Iterator[tuple[Path, int]]:
    """Mount a directory through passthrough_hp; its mount point and its process."""
    with scratch() as folder:
        mount, said = folder / "mount", folder / "said"
        mount.mkdir()
        with said.open("wb") as output:
            process = subprocess.Popen(
                [peer, "--foreground", source, mount], stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + MOUNT_LIMIT_S
            while not is_mounted(mount):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"{peer} mounts nothing: {said.read_text().strip()}")
                time.sleep(POLL_S)
            yield mount, process.pid
        finally:
            if is_mounted(mount):
                subprocess.run(["umount", "-l", str(mount)], check=True)
            process.terminate()
            process.wait()
