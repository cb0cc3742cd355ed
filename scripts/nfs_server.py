"""The real NFS server of tests and benchmarks, as scripts/nfs-server.sh runs it.

As a program it starts one for a directory, and writes to FILE where its configuration is:
`python -m scripts.nfs_server PATH PORT FILE`.
"""

import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from kvfs import runtime
from kvfs.control import request
from kvfs.nfs.export import LOOPBACK, Export, networks
from kvfs.nfs.servers import Ganesha
from scripts.libnfs import Client
from scripts.s3_server import free_ports

SCRIPT = Path(__file__).with_name("nfs-server.sh")


@dataclass
class Server:
    """An NFS server of the directory `path`, a mount of kvfs or not. Its files are in `folder`."""

    folder: Path
    path: Path
    port: int = 0

    def start(self) -> None:
        self.port = self.port or free_ports()
        self._run("start", str(self.path), str(self.port))

    def kill(self) -> None:
        """As kill -9 does."""
        self._run("kill")

    def stop(self) -> None:
        self._run("stop")

    def restart(self) -> None:
        self._run("stop")
        self.start()

    @property
    def pid(self) -> int:
        return int(self._run("status"))

    def client(self, version: int = 3, *, uid: int = 0) -> Client:
        return Client(self.port, self.path, version=version, uid=uid)

    def _run(self, verb: str, *arguments: str) -> str:
        # rpcbind inherits what is not redirected: a pipe would stay open as long as it lives.
        log = self.folder.with_name(f"{self.folder.name}.log")
        with log.open("a") as told:
            done = subprocess.run(
                [str(SCRIPT), verb, str(self.folder), *arguments],
                env=os.environ | {"PYTHON": sys.executable},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                check=False,
                timeout=180,
            )
        if done.returncode:
            raise RuntimeError(f"nfs-server.sh {verb} failed: {log.read_text()[-2000:]}")
        return done.stdout


def forget(path: Path) -> None:
    """Remove the log of a stopped server, and its records of this directory's clients."""
    ganesha = Ganesha(path)
    ganesha.log.unlink(missing_ok=True)
    shutil.rmtree(ganesha.folder, ignore_errors=True)


def main() -> None:
    """Start ganesha."""
    path, port, file = Path(sys.argv[1]).resolve(), int(sys.argv[2]), Path(sys.argv[3])
    mount = runtime.mount_at(path)
    ours = mount is not None and mount.fstype == runtime.FSTYPE
    name = (
        request(path, "status")["identity"]
        if ours
        else str(uuid.uuid5(uuid.NAMESPACE_URL, str(path)))
    )
    allowed = networks("--allow", LOOPBACK)
    export = Export(path, uuid.UUID(name), allowed, allowed, any_port=True)
    ganesha = Ganesha(path)
    file.write_text(str(ganesha.config))
    ganesha.start(export, "127.0.0.1", port, port + 1)


if __name__ == "__main__":
    main()
