"""The kernel's NFS server: one file in /etc/exports.d for one mount.

Contract: `start` has exportfs(8) read the file, or takes it away again; ConfigError if this machine
has no such server. Its threads and versions are the system's (nfs.conf(5)). Not for what is in the
file: `export`.
"""

import os
import shutil
import subprocess
from pathlib import Path

from kvfs import kept, runtime
from kvfs.errors import ConfigError, KvfsError
from kvfs.nfs.export import Export

FOLDER = Path("/etc/exports.d")
PROGRAM = "exportfs"


class Kernel:
    """Exports of the mount at `mountpoint`. `folder` and `proc` are for tests."""

    def __init__(
        self, mountpoint: Path, *, folder: Path = FOLDER, proc: Path = runtime.PROC
    ) -> None:
        self.mountpoint = mountpoint
        self.file = folder / f"kvfs-{runtime.escape(mountpoint)}.exports"
        self.proc = proc

    def start(self, export: Export) -> bool:
        """Return False if just this is exported already."""
        if os.geteuid() != 0:
            raise ConfigError("--start needs root")
        if "\tnfsd\n" not in (self.proc / "filesystems").read_text():
            raise ConfigError(
                "this kernel has no NFS server (no nfsd in /proc/filesystems): modprobe nfsd, or "
                "export with --ganesha"
            )
        if shutil.which(PROGRAM) is None:
            raise ConfigError(f"{PROGRAM} is not installed: apt-get install nfs-kernel-server")
        text = export.line()
        cure = f"take it away, or kvfs export --knfsd --stop {self.mountpoint}"
        found = kept.read(self.file, "a line of exports(5)", cure)
        if found is not None:
            if found == text:
                return False
            raise ConfigError(
                f"{self.mountpoint} is exported otherwise already, by {self.file}: "
                f"kvfs export --knfsd --stop {self.mountpoint} comes first"
            )
        self.file.parent.mkdir(exist_ok=True)
        kept.write(self.file, text)
        try:
            self._tell()
        except KvfsError:
            self.file.unlink()
            raise
        return True

    def stop(self) -> None:
        """Raises ConfigError if it is not exported."""
        if not self.file.exists():
            raise ConfigError(f"{self.mountpoint} is not exported: there is no {self.file}")
        self.file.unlink()
        self._tell()

    @staticmethod
    def _tell() -> None:
        done = subprocess.run([PROGRAM, "-ra"], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip() or f"it exited with {done.returncode}"
            raise KvfsError(f"{PROGRAM} -ra failed: {reason}")
