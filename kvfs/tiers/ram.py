"""The RAM tier: kvfs's own tmpfs with huge pages, or for ordinary users a directory in /dev/shm.

Contract: objects are files, so they survive the daemon. `identity` is that of the NVMe directory;
without NVMe it follows from the mount point. Each new tmpfs of one identity has a greater `epoch`.
If the record of a copy has another epoch, the copy was lost with an earlier tmpfs (reboot,
unmount). So kvfs need not change each record then. A tmpfs with huge=within_size reads 3.5 to 4.2
times as fast as /dev/shm, and writes 5.2 to 8.2 times as fast (docs/benchmarks.md).
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from kvfs import mounts, own_files, runtime
from kvfs.errors import ConfigError, UnsupportedError
from kvfs.tiers.tier import EXISTING, FANOUT, Tier, expect_own_directory
from kvfs.units import human

log = logging.getLogger(__name__)

LABEL_SLACK = 4 << 20  # bytes for the identity and the directories
BURST = 512 << 20  # bytes that a writer of 20 GB/s writes in 25 ms
# Bytes for a catalog in the tmpfs: its logs have at most 64 MiB, and its tables are small.
CATALOG_SLACK = 256 << 20
SOURCE = "kvfs-ram"  # the source of its mounts: kvfs unmounts no mount of another source
_LABEL = re.compile(r"[A-Za-z0-9-]{1,64} [0-9]{1,19}")
SHM = Path("/dev/shm")  # noqa: S108 (its folders are named by user, and private)


def identity_at(mountpoint: Path) -> str:
    """Return the identity of the RAM tier of a mount without NVMe."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"kvfs:{mountpoint}"))


class RamTier(Tier):
    """The RAM tier. Its constructor attaches or mounts its tmpfs, and sets `epoch`."""

    name = "ram"
    number = 1
    _refused = ""  # `huge` of a remount that was refused: `shrink` tries it again

    def __init__(
        self, root: Path, capacity: int, *, identity: str, epoch: int | None, huge: str | None
    ) -> None:
        """Continue the tmpfs of `identity` if it has this epoch, else make one with `epoch` + 1.

        epoch None: the catalog is in the tmpfs itself, so any epoch of it is right. huge None:
        attach the tmpfs unchanged, only to inspect it. Raises ConfigError if no tmpfs can be
        attached or made.
        """
        self.own_mount = os.geteuid() == 0
        self._read_only = -1
        super().__init__(
            root if self.own_mount else own_files.inside(SHM, f"kvfs-{os.geteuid()}-{identity}"),
            capacity,
        )
        self.slow = False
        self.counts_at_once = True
        # The tmpfs is larger than its capacity. Other files than objects need some of this slack. A
        # file that outgrows its reservation uses it until kvfs has evicted objects. A full tmpfs
        # shortens a write, and some connectors do not notice that.
        self.slack = CATALOG_SLACK if epoch is None else LABEL_SLACK
        self.slack += min(capacity // 2, BURST)
        self.huge = False
        self.huge_why = ""
        label = self.root / "identity"
        if not self.own_mount and os.path.lexists(self.root):
            # Any user could have made a directory of that name in /dev/shm.
            expect_own_directory(self.name, self.root)
        found = self._epoch_there(label, identity)
        if found is not None and epoch in (None, found):
            self.epoch = found
            self.adopted = True
            if huge is not None:
                self._resize(huge)
        elif huge is None:
            raise ConfigError(
                f"{self.root} is not the RAM tier of {identity} with the number {epoch}"
            )
        else:
            self.epoch = (epoch or 0) + 1
            self.adopted = False
            self.remove()
            self._mount_new(huge)
            self.make_folders()
            own_files.write(label, f"{identity} {self.epoch}")
        if self.own_mount and huge is not None:
            try:
                self._read_only = mounts.read_only(self.root)
            except OSError as error:
                log.info("%s is lent to nobody, it cannot be mounted read only: %s", root, error)

    def _own_folders(self) -> tuple[Path, ...]:
        return (self.root, self.root.parent)

    def _epoch_there(self, label: Path, identity: str) -> int | None:
        """Return the epoch of an existing tmpfs, None if this tier cannot continue it.

        Raises ConfigError for a mount or file that kvfs did not make.
        """
        at = runtime.mount_at(self.root)
        if self.own_mount and at is None:
            return None
        if self.own_mount and at is not None and (at.source, at.fstype) != (SOURCE, "tmpfs"):
            raise ConfigError(
                f"{self.root} is a mount of {at.fstype} from {at.source}, expected a tmpfs from "
                f"{SOURCE}, or nothing: umount {self.root}"
            )
        expected = "an identity and the number of its life, which kvfs wrote there"
        cure = f"write that back; or give up what only RAM has: remove all of {self.root}"
        if self.own_mount:
            cure = f"write that back; or give up what only RAM has: umount {self.root}"
        text = own_files.read(label, expected, cure)
        if text is None:
            return None
        if not _LABEL.fullmatch(text):
            raise own_files.wrong(label, text, expected, cure)
        owner, _, epoch = text.partition(" ")
        return int(epoch) if owner == identity else None

    def _options(self, huge: str) -> str:
        # nr_inodes=0: no limit, since kvfs accounts at least 4096 bytes for each object.
        size = self.capacity + self.slack
        return f"size={size},nr_inodes=0,mode=0700,huge={huge}"

    def _mount_new(self, huge: str) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.own_mount:
                expect_own_directory(self.name, self.root)
                self.huge_why = "a tmpfs with huge pages needs root, /dev/shm is used"
                return
            if os.listdir(self.root):
                raise ConfigError(
                    f"{self.root} has files in it, expected an empty directory, where memory is to "
                    "be mounted: move them away"
                )
            try:
                mounts.mount(SOURCE, self.root, "tmpfs", _FLAGS, self._options(huge))
                self._say_huge(huge)
            except OSError as error:
                if huge == "never":
                    raise
                mounts.mount(SOURCE, self.root, "tmpfs", _FLAGS, self._options("never"))
                self.huge_why = f"the kernel refuses huge={huge} on tmpfs: {error.strerror}"
        except OSError as error:
            if self.own_mount:
                with contextlib.suppress(OSError):  # another program's file is in it
                    self.root.rmdir()
            cure = ""
            if error.errno == errno.EPERM:
                cure = "; root needs CAP_SYS_ADMIN to mount: use a privileged container"
            raise ConfigError(
                f"RAM tier of {self.capacity} bytes at {self.root} cannot be made: "
                f"{error.strerror}{cure}"
            ) from error

    def _resize(self, huge: str) -> None:
        if not self.own_mount:
            self.huge_why = "a tmpfs with huge pages needs root, /dev/shm is used"
            return
        try:
            self._remount(huge)
        except OSError as error:
            why = error.strerror
            if error.errno == errno.EINVAL:
                why = f"it has more than the new size of {human(self.capacity)} now"
            size = os.statvfs(self.root)
            self.shortage = (
                f"its memory keeps its former size of {human(size.f_blocks * size.f_frsize)}: {why}"
            )
            self._refused = huge
            log.warning(
                "RAM tier %s: %s; kvfs tries again each second, while it evicts what is beyond",
                *(self.root, self.shortage),
            )
        self._say_huge(huge)

    def shrink(self) -> None:
        """Give the tmpfs its size, if it had more bytes than that before."""
        if not self._refused:
            return
        try:
            self._remount(self._refused)
        except OSError as error:
            log.debug("RAM tier %s keeps its former size: %s", self.root, error)
            return
        self._refused = self.shortage = ""
        log.info("RAM tier %s has its size of %s now", self.root, human(self.capacity))

    def _remount(self, huge: str) -> None:
        """Give the tmpfs its size. Raises OSError."""
        flags = _FLAGS | mounts.MS_REMOUNT
        mounts.mount(SOURCE, self.root, "tmpfs", flags, self._options(huge))

    def _say_huge(self, huge: str) -> None:
        self.huge = huge != "never"
        self.huge_why = f"tmpfs huge={huge}"

    def left(self) -> int:
        return super().left() - LABEL_SLACK

    def estimate(self) -> None:
        """Count all content of the tmpfs as used until the census has counted it.

        Call it after reservations are made.
        """
        if not self.adopted:
            return
        self.uncounted = self.capacity  # in /dev/shm, which has files of other programs, too
        if self.own_mount:
            self.uncounted = max(0, self.taken() - self.reserved)

    @property
    def lends(self) -> bool:
        """Whether `lend` can succeed: the tmpfs has a read-only mount for it."""
        return self._read_only >= 0

    def lend(self, ino: int, version: int) -> int:
        """Open a file read-only for another process.

        The descriptor is of a separate read-only mount. So a process that may not mount cannot open
        the file for writing through /proc, either. Raises UnsupportedError if there is no such
        mount, NotFoundError, InUseError, TierError.
        """
        if self._read_only < 0:
            raise UnsupportedError(f"{self.name} tier: {self.root} cannot be mounted read only")
        path = f"objects/{ino % FANOUT:02x}/{ino:x}.{version:x}"
        try:
            return os.open(path, os.O_RDONLY | EXISTING, dir_fd=self._read_only)
        except OSError as error:
            raise self.open_error("lend", path, error) from error

    def close(self) -> None:
        if self._read_only >= 0:
            os.close(self._read_only)
            self._read_only = -1

    def remove(self) -> None:
        """Unmount and free the tmpfs, and lose its content. Lent files stay until their close."""
        if self.own_mount:
            while runtime.mount_at(self.root) is not None:
                mounts.umount(self.root, mounts.MNT_DETACH)
            with contextlib.suppress(OSError):  # already gone, or another program's file is in it
                self.root.rmdir()
        elif self.root.is_dir():
            shutil.rmtree(self.root)


_FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
