"""The NVMe tier: a directory on a local file system, owned by one kvfs at a time.

Contract: a lock file guards the directory against a second kvfs, and an identity (a UUID, made at
the first mount) tells it from others. The catalog lives beside the objects, so the directory can
be moved to another machine as a whole.
"""

import errno
import fcntl
import logging
import os
import time
import uuid
from collections import Counter
from pathlib import Path

from kvfs import kept, runtime
from kvfs.errors import ConfigError, InUseError
from kvfs.tiers.tier import PACKING_COUNTERS, Tier, expect_own_directory

PROBE = "probe"  # a name that the sweep takes for a half-made file
EXT4 = 0xEF53  # f_type
_PATTERN = bytes(range(256)) * 16
log = logging.getLogger(__name__)

DISK_RESERVE = 64 << 20  # bytes of the file system that kvfs leaves to others
_IDENTITY_CURE = (
    "restore it, or remove it: the next mount makes another one, without what only RAM had"
)
_INODE_CURE = "remove it; if the directory is a copy, remove `identity` beside it as well"


def identity_in(root: Path) -> str | None:
    """The identity of an NVMe directory, None for a new one. Raises ConfigError."""
    return kept.read_uuid(root / "identity", _IDENTITY_CURE)


class NvmeTier(Tier):
    """The tier; opening it takes the lock. Raises InUseError if that is held, else ConfigError.

    expected: the identity that the directory must have. Without `expected`, a directory without an
    identity gets one: `fresh` if that is given.
    """

    name = "nvme"
    number = 2

    def __init__(
        self, root: Path, capacity: int, *, expected: str | None = None, fresh: str = ""
    ) -> None:
        super().__init__(root, capacity)
        self.counters = Counter(dict.fromkeys(PACKING_COUNTERS, 0))
        self.measured = 0.0  # when, on the monotonic clock
        self.capacity_excludes_objects = (
            False  # the size is a share of the free space, plus the space of its objects
        )
        if expected is not None:
            self._expect(expected)
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            expect_own_directory(self.name, root)
            flags, cure = os.O_RDWR | os.O_CREAT, "remove it, while nothing is mounted with it"
            self._lock = kept.opened(root / "lock", flags, "the name of who has it locked", cure)
        except OSError as error:
            raise ConfigError(f"nvme={root} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise InUseError(
                f"nvme={root} is in use by another kvfs ({holder}): "
                "unmount that one, or give this mount a directory of its own",
                holder,
            ) from error
        try:
            # It reserves blocks when they are written, and counts them in the file at that time.
            self.counts_at_once = runtime.filesystem_magic(root) == EXT4
            self.identity = self._identity(root / "identity", fresh)
            self.make_folders()
        except ConfigError:
            os.close(self._lock)
            raise
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"nvme={root} cannot be used: {error}") from error

    def _expect(self, identity: str) -> None:
        """Raise if this is another directory, such as the mount point of a missing disk."""
        found = identity_in(self.root) or "none"
        if found != identity:
            raise ConfigError(
                f"nvme={self.root} has identity {found}, expected {identity}: "
                "mount the file system there that was there before"
            )

    @staticmethod
    def _identity(path: Path, wanted: str) -> str:
        """The identity of this directory. A copied directory gets another one.

        Two directories with one identity would share a RAM tier, and each would take the other's
        bytes for its own.
        """
        inode = path.with_suffix(".inode")  # of the identity's file, which a copy does not share
        identity, noted = identity_in(path.parent), kept.read_number(inode, _INODE_CURE)
        copied = None not in {identity, noted} and noted != path.stat().st_ino
        if copied:
            log.warning("%s is a copy: it begins without what the other has in RAM", path.parent)
        if copied or identity is None:
            identity, noted = wanted if wanted and not copied else str(uuid.uuid4()), None
            inode.unlink(missing_ok=True)
            kept.write(path, f"{identity}\n")
        if noted is None:
            kept.write(inode, str(path.stat().st_ino))
        return identity

    def write_holder(self, who: str) -> None:
        """Write into the lock file who holds it, for the message to the next kvfs."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, who.encode(), 0)

    def measure(self, written: int) -> None:
        """Limit the capacity to what the device has left. Raises OSError.

        written: reserved bytes that are on the device already; the other reserved bytes are yet to
        come.
        """
        found = os.statvfs(self.root)
        self.measured = time.monotonic()
        spare = min(DISK_RESERVE, found.f_blocks * found.f_frsize // 20)
        left = max(0, found.f_bavail * found.f_frsize - spare)
        self.capacity = min(self.configured_capacity, self.used + written + left)
        self.shortage = ""
        if self.capacity < self.configured_capacity:
            self.shortage = f"others fill its file system: {left} bytes are left for kvfs"

    def present(self) -> bool:
        return (self.root / "identity").exists()

    def probe(self) -> str:
        """Create, sync, read and unlink a small file near objects; return the failure, or ""."""
        path = f"{self.folders[0]}{PROBE}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, _PATTERN, 0)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the page cache never fails
                found = os.pread(fd, len(_PATTERN), 0)
            finally:
                os.close(fd)
                os.unlink(path)
        except FileNotFoundError:
            return "lost: its directory is not there"
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return ""  # short of room is healthy
            return f"probe: {errno.errorcode.get(error.errno or 0, 'unknown error')}"
        return "" if found == _PATTERN else "probe: it reads other bytes than were written"

    def close(self) -> None:
        os.close(self._lock)
