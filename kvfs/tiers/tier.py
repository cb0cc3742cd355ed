"""A local tier: a directory in which each copy of an object is one file with only its bytes.

Contract: a backing file is named by inode and version. No other object overwrites it. kvfs removes
it only by unlink, because a program may have it open or mapped. `used` and `reserved` are bytes
that other modules account here; the tier itself never refuses a file for lack of room. Methods do
their system calls in the calling thread. For a tier on a disk, callers therefore run the methods in
its threads (`calls`), so that a slow disk does not stop the loop. Only a `Reservation` changes
`reserved`. Not for policy: the layers above decide which object is in which tier.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from kvfs import acl, failpoints
from kvfs.errors import (
    ConfigError,
    InUseError,
    KvfsError,
    NoSpaceError,
    NotFoundError,
    TierError,
    UsageError,
)
from kvfs.tiers.calls import Calls, Health

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

FANOUT = 256  # directories of backing files; ext4's htree in each stays shallow at 10^7 objects
EXISTING = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # flags to open an existing file
PACKING_COUNTERS = (  # counters of a tier that has compressed copies; _us: microseconds
    "compressed",
    "compressed_bytes",
    "compressed_to_bytes",
    "not_compressed",
    "compress_cpu_us",
    "decompressed",
    "decompress_cpu_us",
)
INODE_COST = 4096  # bytes; the least cost of a copy, so that an empty file has a cost, too


class Tier:
    """A local tier.

    `capacity`, `used` and `reserved` are bytes. `objects` counts copies, `hits` opens of them.
    """

    name = "tier"
    number = 0  # its number in the session file
    mounted = True

    def __init__(self, root: Path, capacity: int) -> None:
        self.root = root
        self.configured_capacity = capacity
        self.capacity = capacity  # less than configured while others fill the device
        self.used = 0
        self.reserved = 0
        self.uncounted = 0  # estimated bytes of copies that the census has not counted yet
        self.objects = 0
        self.hits = 0
        self.shortage = ""  # why its capacity may be less than configured
        self.slow = True  # calls may wait for a disk
        self.counts_at_once = False  # its file system counts a block as soon as a file has it
        self.health = Health(f"{self.name} tier {root}", time.monotonic())
        self.calls = Calls(self.health)  # for a tier that is slow
        self._logged: set[str] = set()  # kinds of failure logged since it was healthy
        self.folders = [f"{root}/objects/{number:02x}/" for number in range(FANOUT)]

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved - self.uncounted

    @property
    def works(self) -> bool:
        """Whether it is mounted, and not down."""
        return self.mounted and not self.health.down

    @staticmethod
    def cost(blocks: int) -> int:
        """Bytes to account for a copy that takes so many 512-byte blocks."""
        return max(INODE_COST, blocks * 512)

    def make_folders(self) -> None:
        """Create the directories of backing files. Raises OSError."""
        for folder in self.folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        (self.root / "quarantine").mkdir(mode=0o700, exist_ok=True)

    def let_read(self, uid: int) -> None:
        """Let another user read all object files, also those to come, and nothing else here.

        The files stay in place, with their owner. A folder that has the user's entry is done, so a
        second call is quick. Raises ConfigError.
        """
        if uid == os.geteuid():
            return
        try:
            for folder in self.folders:
                if not acl.has(folder, uid):
                    acl.inherit(folder, uid, acl.READ)
                    with os.scandir(folder) as entries:
                        for entry in entries:
                            if entry.is_file(follow_symlinks=False):
                                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                                    acl.allow(entry.path, uid, acl.READ)
                    acl.allow(folder, uid, acl.PASS)
            for above in (self.root / "objects", *self._own_folders()):
                acl.allow(above, uid, acl.PASS)
        except OSError as error:
            raise ConfigError(
                f"{self.name} tier: uid {uid} cannot get access to {error.filename}: "
                f"{error.strerror}; the file system needs POSIX ACLs"
            ) from None
        for parent in self.root.resolve().parents:
            if not acl.passes(parent, uid):
                raise ConfigError(
                    f"{self.name} tier: uid {uid} cannot pass {parent}: "
                    f"setfacl -m u:{uid}:x {parent}, or give another directory"
                )

    def let_nobody_read(self) -> None:
        """Undo `let_read`: nobody but the owner passes the folders. Raises OSError."""
        acl.remove(self.root / "objects")

    def _own_folders(self) -> tuple[Path, ...]:
        """The directories above the objects that kvfs has made itself."""
        return (self.root,)

    def path(self, ino: int, version: int) -> str:
        return f"{self.folders[ino % FANOUT]}{ino:x}.{version:x}"

    def create(self, ino: int, version: int) -> int:
        """A new, empty backing file, open for reading and writing. Raises TierError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if failpoints.active:
                failpoints.reach("tiers.create")
            fd = os.open(self.path(ino, version), flags, acl.FILE_MODE)
        except OSError as error:
            raise self.failed("create", self.path(ino, version), error) from error
        if failpoints.active:
            failpoints.reach("tiers.created")
        return fd

    def uncreate(self, fd: int, ino: int, version: int) -> None:
        """Undo a `create` whose caller had stopped waiting: close and unlink the file."""
        os.close(fd)
        self.unlink(ino, version)

    def open(self, ino: int, version: int, *, writable: bool) -> int:
        """Open a copy. Raises NotFoundError if there is no such file, InUseError, else TierError.

        InUseError: a root process, to which kvfs lent the file, has a kernel lease of it. With a
        lease it could delay the open for 45 s (fcntl(2), F_SETLEASE).
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | EXISTING
        path = self.path(ino, version)
        try:
            if failpoints.active:
                failpoints.reach("tiers.open")
            return os.open(path, flags)
        except OSError as error:
            raise self.open_error("open", path, error) from error

    def open_error(self, verb: str, path: str, error: OSError) -> KvfsError:
        """Return the domain error for a file that could not be opened, and record a failure."""
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self.name} tier: {path} is gone")
        if isinstance(error, BlockingIOError):
            return InUseError(f"{self.name} tier: a process has a lease of {path}")
        return self.failed(verb, path, error)

    @classmethod
    def is_in_use(cls, fd: int) -> bool:
        """Whether a program has the file of `fd` open or mapped, apart from `fd`.

        With passthrough, kvfs finds a mapping this way: a mapping still uses the backing file after
        the kernel reported the last close. The kernel grants a lease only on a file without other
        users.
        """
        found = cls._is_in_use_keeping_lease(fd)
        if not found:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return found

    @staticmethod
    def _is_in_use_keeping_lease(fd: int) -> bool:
        """As `is_in_use`, but keep the lease if the file is not in use."""
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN  # otherwise this file system has no leases
        return False

    def rename(self, ino: int, version: int, new_version: int) -> None:
        """Give a copy another version in its file name. Raises TierError."""
        try:
            if failpoints.active:
                failpoints.reach("tiers.rename")
            os.rename(self.path(ino, version), self.path(ino, new_version))
        except OSError as error:
            raise self.failed("rename", self.path(ino, version), error) from error
        if failpoints.active:
            failpoints.reach("tiers.renamed")

    def unlink(self, ino: int, version: int) -> bool:
        """Unlink a copy; return False after a failure, which is logged. A missing file is none."""
        try:
            if failpoints.active:
                failpoints.reach("tiers.unlink")
            os.unlink(self.path(ino, version))
        except FileNotFoundError:
            log.debug("%s tier: %s was gone already", self.name, self.path(ino, version))
        except OSError as error:
            self.failed("unlink", self.path(ino, version), error)
            return False
        if failpoints.active:
            failpoints.reach("tiers.unlinked")
        return True

    def unlink_watched(self, ino: int, version: int) -> tuple[bool, int]:
        """Unlink a copy. Return whether `unlink` succeeded, and a descriptor.

        The descriptor is of the unlinked file if a program has it open or mapped, else -1. The
        caller watches it (`is_in_use`), and closes it.
        """
        try:
            fd = os.open(self.path(ino, version), os.O_RDONLY | EXISTING)
        except OSError:  # `unlink` reports a missing file or other failure
            fd = -1
        done = self.unlink(ino, version)
        if fd >= 0 and not (done and self._is_in_use_keeping_lease(fd)):
            os.close(fd)  # this also ends the lease
            fd = -1
        return done, fd

    def quarantine(self, ino: int, version: int) -> bool | None:
        """Move a damaged copy into the quarantine, so that people can inspect it.

        The accounts do not have it any more. Returns None if there was no file. Returns False after
        a failure, which is logged: then the file is still in its place.
        """
        path = self.path(ino, version)
        try:
            if failpoints.active:
                failpoints.reach("tiers.quarantine")
            os.rename(path, self.root / "quarantine" / os.path.basename(path))
        except FileNotFoundError:
            log.debug("%s tier: %s is gone, quarantine keeps nothing of it", self.name, path)
            return None
        except OSError as error:
            self.failed("quarantine", path, error)
            return False
        if failpoints.active:
            failpoints.reach("tiers.quarantined")
        return True

    def files(self) -> Iterator[tuple[int, int, str]]:
        """Yield (inode, version, path) of each backing file; inode 0: the file is foreign."""
        for folder in self.folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    ino, _, version = entry.name.partition(".")
                    try:
                        yield int(ino, 16), int(version, 16), entry.path
                    except ValueError:
                        yield 0, 0, entry.path

    def present(self) -> bool:
        """Whether the tier's directory is still there. If not, all files are missing, not one."""
        return os.path.isdir(self.folders[0])

    def failed(self, verb: str, path: str, error: OSError) -> KvfsError:
        """Record a failure of a system call on a backing file, and return its domain error.

        Logs each kind of failure once, because a failing disk has thousands.
        """
        kind = errno.errorcode.get(error.errno or 0, "unknown error")
        why = error.strerror or error
        message = f"{self.name} tier: {verb} of {path} failed: {kind} {why}"
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = f"{verb}: {kind}"
        if not full:
            if self.health.state == "healthy":
                self._logged.clear()
            self.health.failed(time.monotonic(), what)
        if what not in self._logged:
            self._logged.add(what)
            log.error("%s (kvfs tests the tier; more of the same kind is not logged)", message)
        return NoSpaceError(message) if full else TierError(message)

    def left(self) -> int:
        """Free bytes on the device. Raises OSError."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def taken(self) -> int:
        """Bytes that all files of the tier's file system take now. Raises OSError."""
        found = os.statvfs(self.root)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def exact_taken(self) -> int | None:
        """`taken`, if its value tells whether a file got blocks since another call; else None.

        Some file systems count blocks that no file has yet, or count them late.
        """
        try:
            return self.taken() if self.counts_at_once else None
        except OSError:
            return None

    def close(self) -> None:
        """Release the tier's lock and descriptors. The files stay."""


class Reservation:
    """`size` bytes of `tier` that are set aside for one file, until `release`.

    A reservation has one owner: a `with` block, an open object, or an orphan. The end of the block
    releases the bytes, unless the block has given them to a new owner by `keep`. Not for deciding
    whether there is room: `Room` does that.
    """

    __slots__ = ("size", "tier")

    def __init__(self, tier: Tier, size: int) -> None:
        self.tier = tier
        self.size = 0
        self.resize(size)

    def resize(self, size: int) -> None:
        """Set aside this many bytes instead."""
        self.tier.reserved += size - self.size
        self.size = size

    def release(self) -> None:
        """Return the bytes; a second call does nothing."""
        self.resize(0)

    def keep(self) -> "Reservation":
        """Return a new reservation with these bytes, for another owner. This one has none then."""
        kept = Reservation(self.tier, 0)
        kept.size, self.size = self.size, 0
        return kept

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.tier.name}, {self.size})"


def expect_own_directory(option: str, root: Path) -> None:
    """Raise unless only the user of this daemon could have made a tier's directory.

    Call it before you read or write anything there. It refuses a directory of another user, a
    symbolic link in it, and a parent directory to which everybody may write. It trusts the owner
    and the group of a parent directory. Not for the modes of the directory itself, nor for later
    changes by a user with permission.

    option: its name, with which the text of ConfigError begins. Raises ConfigError, OSError.
    """
    mine = os.geteuid()
    link = root.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in {0, mine}:
        raise UsageError(
            f"{option}={root} is a symbolic link that uid {link.st_uid} has made, expected a "
            "directory, or a link of yours"
        )
    real = Path(os.path.realpath(root))
    found = real.stat()
    if found.st_uid != mine:
        raise UsageError(
            f"{option}={root} belongs to uid {found.st_uid}, expected uid {mine}, who mounts: "
            f"others could change its files; chown -R {mine} {real}, or give another directory"
        )
    for above in real.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UsageError(
                f"{option}={root} is below {above}, to which everybody may write, and so put "
                f"something else in its place; chmod o-w {above}, or give another directory"
            )
    for folder in (real, real / "objects"):
        if folder.is_dir():
            with os.scandir(folder) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
            if links:
                raise ConfigError(
                    f"{option}={root}: {links[0]} is a symbolic link, expected what kvfs makes "
                    "there itself; take it away, or give another directory"
                )
