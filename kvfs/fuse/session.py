"""pyfuse3's session on the open /dev/fuse, and the file that hands it to the next daemon.

Contract: the keeper has mounted. The session file belongs to one mount of one boot, and its first
bytes say which one. The rest of the file is the C part's. Only `Session` imports pyfuse3, after the
C part. Not for the meaning of operations.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvfs import runtime
from kvfs.config import Config
from kvfs.errors import ConfigError, KvfsError
from kvfs.fuse.passthrough import FILE_SIZE, TEXT, Passthrough
from kvfs.fuse.readers import Readers

if TYPE_CHECKING:
    from kvfs.fuse.operations import Operations

LAYOUT = 1  # of the C part's record
# Requests being handled. A hanging disk may stop all of pyfuse3's own 99, and then no worker would
# read the requests that need no disk. A task is a few KiB, and is made when it is needed.
MAX_TASKS = 100_000
IDLE_TASKS = 8  # kept when idle: with pyfuse3's one, tasks were made and ended all the time


def _label(mountpoint: Path) -> bytes:
    words = ["kvfs session", str(LAYOUT), runtime.boot_id(), str(mountpoint)]
    return os.fsencode("\n".join(words) + "\n")


def create_file(path: Path, mountpoint: Path) -> int:
    """Create an empty session file; return it open. Raises OSError."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.truncate(file, FILE_SIZE)
    os.pwrite(file, _label(mountpoint), 0)
    return file


def open_file(path: Path, mountpoint: Path) -> int:
    """Open the previous daemon's session file. Raises ConfigError if it is not this mount's."""
    expected = _label(mountpoint)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"session file {path} cannot be opened: {error}") from error
    size = os.fstat(file).st_size  # 0 if it is not a regular file, and cannot be read as one
    found = os.pread(file, TEXT, 0).rstrip(b"\0") if size else b""
    if found != expected or size != FILE_SIZE:
        os.close(file)
        raise ConfigError(
            f"session file {path} does not fit: it says {found[:200]!r} and has {size} bytes, "
            f"expected {expected!r} and {FILE_SIZE}; nothing is changed"
        )
    return file


def backings_for(config: Config) -> Passthrough:
    """Choose the kernel or the daemon to serve the bytes. Raises ConfigError."""
    if config.passthrough == "off":
        return Passthrough(unwanted="turned off by passthrough=off")
    if os.geteuid() != 0:
        if config.passthrough == "on":
            raise ConfigError("passthrough=on needs root (CAP_SYS_ADMIN); mount as root, or auto")
        return Passthrough(unwanted="needs root")
    return Passthrough(fast_open=config.fast_open)


class Session:
    """A mounted file system. `run` serves it until anyone unmounts it, or `stop`."""

    def __init__(self, config: Config, operations: "Operations") -> None:
        """Raises KvfsError if libfuse refuses the session."""
        import pyfuse3  # noqa: PLC0415 (after the C part)

        self._pyfuse3 = pyfuse3
        self.stopped = False
        self.ended = False  # the kernel sends no more requests to this daemon
        try:
            pyfuse3.init(operations, str(config.mountpoint), {"default_permissions"})
        except RuntimeError as error:
            raise KvfsError(
                f"{config.mountpoint} cannot be served: {error}; `kvfs doctor` may know why"
            ) from error

    async def run(self) -> None:
        self._pyfuse3.trio = Readers(Passthrough.readable)  # type: ignore[attr-defined]
        await self._pyfuse3.main(min_tasks=IDLE_TASKS, max_tasks=MAX_TASKS)
        self.ended = True

    def stop(self) -> None:
        """Read no more requests; `run` ends when the requests read so far are answered."""
        self.stopped = True
        self._pyfuse3.terminate()
