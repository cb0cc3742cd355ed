"""The NVMe tier: a directory on a local file system, owned by one kvfs at a time.

Contract: a lock file keeps a second kvfs out of the directory. An identity, a UUID of the first
mount, distinguishes the directory from others. The catalog is in the same directory, so people can
move all of it to another machine.
"""

import errno
import fcntl
import logging
import os
import time
import uuid
from collections import Counter
from pathlib import Path

from kvfs import own_files, runtime
from kvfs.errors import ConfigError, InUseError
from kvfs.tiers.tier import PACKING_COUNTERS, Tier, expect_own_directory

PROBE = "probe"  # the name of the probe's file; the census sweeps it like any foreign file
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
    return own_files.read_uuid(root / "identity", _IDENTITY_CURE)


class NvmeTier(Tier):
    """The NVMe tier. Its constructor takes the lock of the directory.

    expected: the identity that the directory must have. Without `expected`, a directory without an
    identity gets one: `fresh` if that is given. Raises InUseError if another kvfs has the lock,
    else ConfigError.
    """

    name = "nvme"
    number = 2

    def __init__(
        self, root: Path, capacity: int, *, expected: str | None = None, fresh: str = ""
    ) -> None:
        super().__init__(root, capacity)
        self.counters = Counter(dict.fromkeys(PACKING_COUNTERS, 0))
        self.measured = 0.0  # the time of the last `measure`, on the monotonic clock
        # True: the capacity is a share of the free space, so the census adds the objects' bytes.
        self.capacity_excludes_objects = False
        if expected is not None:
            self._expect(expected)
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            expect_own_directory(self.name, root)
            flags, cure = os.O_RDWR | os.O_CREAT, "remove it, while nothing is mounted with it"
            self._lock = own_files.open_regular(
                root / "lock", flags, "the name of who has it locked", cure
            )
        except OSError as error:
            raise ConfigError(f"nvme={root} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise InUseError(
                f"nvme={root} is in use by another kvfs ({holder}): "
                "unmount that one (once unmounted, it ends with its last open file), or give this "
                "mount a directory of its own",
                holder,
            ) from error
        try:
            # ext4 counts a block of a file when the block is written.
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
        """Raise ConfigError if the directory has another identity: its disk may be missing."""
        found = identity_in(self.root) or "none"
        if found != identity:
            raise ConfigError(
                f"nvme={self.root} has identity {found}, expected {identity}: "
                "mount the former file system there again"
            )

    @staticmethod
    def _identity(path: Path, wanted: str) -> str:
        """Return the identity of this directory. A copied directory gets a new one.

        path: the file of the identity. wanted: the identity for a new directory; "": a random one.
        Two directories with one identity would share a RAM tier, and each would treat the other's
        bytes as its own.
        """
        inode = path.with_suffix(".inode")  # its inode number: a copied file has another number
        identity, noted = identity_in(path.parent), own_files.read_number(inode, _INODE_CURE)
        copied = None not in {identity, noted} and noted != path.stat().st_ino
        if copied:
            log.warning(
                "%s is a copy: the mount begins without the objects that only the other's RAM has",
                path.parent,
            )
        if copied or identity is None:
            identity, noted = wanted if wanted and not copied else str(uuid.uuid4()), None
            inode.unlink(missing_ok=True)
            own_files.write(path, f"{identity}\n")
        if noted is None:
            own_files.write(inode, str(path.stat().st_ino))
        return identity

    def write_holder(self, who: str) -> None:
        """Write the holder `who` into the lock file, for the message of another kvfs."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, who.encode(), 0)

    def measure(self, written: int) -> None:
        """Limit the capacity to the bytes that the device has left. Raises OSError.

        written: the reserved bytes that files have on the device already.
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
                # Read from the disk: a read from the page cache never fails.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                found = os.pread(fd, len(_PATTERN), 0)
            finally:
                os.close(fd)
                os.unlink(path)
        except FileNotFoundError:
            return "lost: its directory is not there"
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return ""  # a full disk is healthy
            return f"probe: {errno.errorcode.get(error.errno or 0, 'unknown error')}"
        return "" if found == _PATTERN else "probe: it reads other bytes than were written"

    def close(self) -> None:
        os.close(self._lock)
