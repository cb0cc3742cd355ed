"""The real S3 server of tests and benchmarks, as scripts/s3-server.sh runs it, on free ports."""

import os
import shlex
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.s3.place import BucketPlace

SCRIPT = Path(__file__).with_name("s3-server.sh")
PORTS = range(41)  # from the first one: gateway, monitor, and those of the other daemons
_CLAIMS: list[socket.socket] = []


@dataclass
class Server:
    """Use `start` first. `credentials` are environment variables; data is below `folder`."""

    folder: Path
    port: int = 0
    credentials: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or what is dead of it."""
        self.port = self.port or free_ports()
        exports = self._run("start", str(self.port)).removeprefix("export ")
        named = dict(one.split("=", 1) for one in shlex.split(exports))
        del named["S3_ENDPOINT_URL"]  # boto3 is told by its arguments
        self.credentials = named

    def kill(self, *daemons: str) -> None:
        """End daemons as kill -9 does: rgw, osd, mon; all if none is named."""
        self._run("kill", *daemons)

    def suspend(self) -> None:
        """The gateway says nothing from now on, and drops no connection."""
        os.kill(self._gateway, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._gateway, signal.SIGCONT)

    @property
    def _gateway(self) -> int:
        return int((self.folder / "run" / "rgw.pid").read_text())

    def stop(self) -> None:
        self._run("stop")

    def wipe(self) -> None:
        """Stop it and delete what it has."""
        self._run("wipe")

    def pids(self) -> list[int]:
        """Of its daemons, as they are now."""
        return [int(path.read_text()) for path in (self.folder / "run").glob("*.pid")]

    def place(self, bucket: str, prefix: str = "") -> BucketPlace:
        return BucketPlace(bucket, prefix, self.endpoint, "us-east-1")

    def _run(self, verb: str, *arguments: str) -> str:
        # Its daemons inherit standard error: a pipe would stay open as long as they live.
        with (self.folder.parent / "s3-server.log").open("a") as log:
            done = subprocess.run(
                [str(SCRIPT), verb, str(self.folder), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                timeout=180,
            )
        if done.returncode:
            told = (self.folder.parent / "s3-server.log").read_text()
            raise RuntimeError(f"s3-server.sh {verb} failed: {told[-2000:]}")
        return done.stdout


def free_ports() -> int:
    """Return the first of as many free ports in a row as the server needs.

    The server takes the ports later. So this function claims them against other processes that call
    it, by a name that no other process can have while this one lives.
    """
    for first in range(20000, 32000, 50):  # below the ports that the kernel gives to clients
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvfs-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        if all(map(_free, (first + offset for offset in PORTS))):
            _CLAIMS.append(claim)
            return first
        claim.close()
    raise RuntimeError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
