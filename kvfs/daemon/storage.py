"""The storage of a mount: tiers and catalog, locked, and the session begun in them.

Contract: if `open` raises ConfigError, it has changed nothing, except that a new tmpfs may exist.
`close` releases the locks. A takeover waits a moment for the locks of the dead daemon.
"""

import errno
import logging
import os
import subprocess
import time
from pathlib import Path

from kvfs import mounts, own_files, runtime
from kvfs.catalog import BUCKET_KINDS, Catalog
from kvfs.catalog.database import LOOKED_AT
from kvfs.config import Config
from kvfs.core.ledger import doubts, recovery
from kvfs.core.ledger.dirty import BUCKET_FACT, CAUGHT_UP
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.removals import InvalidateName
from kvfs.core.ledger.sessions import mounted_as, past_sessions, ram_epoch
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.names.tree import Tree
from kvfs.errors import CatalogError, ConfigError, KvfsError
from kvfs.tiers import Bucket, NvmeTier, RamTier
from kvfs.tiers.ram import identity_at

log = logging.getLogger(__name__)

LOCKS_PATIENCE = 1.0  # s that a takeover waits for the locks of the dead daemon


class MountStorage:
    """Tiers, catalog and session. `relied_on`: a successor will need the RAM tier's files."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        bucket: Bucket | None,
        *,
        takeover: bool,
        fresh: str = "",
    ) -> None:
        """directory: the mount's runtime files; a file there has the identity of the NVMe tier.

        fresh: the identity of a new NVMe directory. The bucket and the pool know it already.
        """
        self.config = config
        self.bucket = bucket
        self.directory = directory
        self._fresh = fresh
        self.takeover = self.relied_on = takeover
        self._nvme: NvmeTier | None = None
        self._ram: RamTier | None = None
        self._catalog: Catalog | None = None
        self._session = 0  # `close` ends this session

    def open(self, invalidate_name: InvalidateName) -> Ledger:
        """Begin a session, or continue the predecessor's session. Raises ConfigError."""
        deadline = time.monotonic() + (LOCKS_PATIENCE if self.takeover else 0)
        while True:
            try:
                return self._open(invalidate_name)
            # The dead predecessor still has the locks for a moment, or the catalog is unreadable.
            except (ConfigError, CatalogError) as error:
                self.close(ended=False)
                if time.monotonic() > deadline:
                    if isinstance(error, CatalogError):
                        raise ConfigError(
                            f"{error}: nothing is changed; restore it, or remove the whole NVMe "
                            "directory to begin anew"
                        ) from error
                    raise
                time.sleep(0.02)

    def _open(self, invalidate_name: InvalidateName) -> Ledger:
        config = self.config
        identity = identity_at(config.mountpoint)
        if config.nvme is not None:
            self._nvme = NvmeTier(
                config.nvme,
                config.nvme_size,
                expected=self._identity_before(),
                fresh=self._fresh,
            )
            self._nvme.capacity_excludes_objects = "nvme_size" in config.fitted
            self._nvme.write_holder(f"process {os.getpid()}, mounted on {config.mountpoint}")
            identity = self._nvme.identity
            own_files.write(self.directory / "nvme", identity)
            self._catalog = Catalog(config.nvme / "catalog", first_id=_first_id())
            if not self.takeover:
                self._catalog.database.look_through(LOOKED_AT)
        epoch = None
        # A catalog in doubt proves nothing about the files of the RAM tier: they stay.
        if self._catalog is not None and not self._catalog.doubt:
            epoch = ram_epoch(self._catalog)
        root = runtime.ram_path(identity)
        if config.ram:
            self._ram = RamTier(root, config.ram, identity=identity, epoch=epoch, huge=config.huge)
        elif runtime.mount_at(root) is not None:
            log.warning("ram=0: objects that only the RAM tier of the last session had are lost")
            mounts.umount(root, mounts.MNT_DETACH)
            root.rmdir()
        if self._catalog is None:
            assert self._ram is not None  # the configuration has one tier at least
            self._catalog = Catalog(self._ram.root / "catalog", first_id=_first_id())
        bind(self._catalog, self.bucket)
        ledger = begin_session(
            *(self._catalog, self._ram, self._nvme),
            bucket=self.bucket,
            takeover=self.takeover,
            invalidate_name=invalidate_name,
        )
        self._session = ledger.session
        return ledger

    def _identity_before(self) -> str | None:
        """Return the identity that the NVMe tier must have: the disk may have been exchanged."""
        if not self.takeover:
            return None
        cure = f"write there what {self.config.nvme}/identity has, if that is the right disk"
        return own_files.read_uuid(self.directory / "nvme", cure)

    def close(self, *, ended: bool, patience: float | None = None) -> None:
        """Release the locks. `ended`: sync the objects on NVMe, and free the memory of RAM.

        patience: seconds for the sync. If the sync takes longer, the catalog does not record the
        end of the session, as after a crash. The caller must then end the process.
        """
        catalog, nvme, ram = self._catalog, self._nvme, self._ram
        try:
            if catalog is not None:
                if ended and nvme is not None and self._session:
                    _sync(nvme.root, patience)
                    catalog.set_fact("clean", str(self._session))
                catalog.close()
        except (KvfsError, OSError) as error:
            where = self.config.mountpoint
            log.error("%s: the session is not closed properly, as after a crash: %s", where, error)
        if ram is not None:
            ram.close()
            if ended or not (self.relied_on or ram.adopted):
                ram.remove()
        if nvme is not None:
            nvme.close()
        self._catalog = self._ram = self._nvme = None


def _sync(root: Path, patience: float | None) -> None:
    """Sync a file system, within `patience` seconds unless it is None.

    With a patience another process syncs, because a sync cannot be killed. Raises OSError.
    """
    if patience is None:
        mounts.syncfs(root)
        return
    other = subprocess.Popen(["sync", "-f", root], stdin=subprocess.DEVNULL)
    try:
        code = other.wait(patience)
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            errno.ETIMEDOUT, f"it is not synced within {patience:.0f} s", str(root)
        ) from None
    if code:
        raise OSError(errno.EIO, f"sync ended with {code}", str(root))


def _first_id() -> int:
    """Return the first number for a new catalog, above all numbers of earlier catalogs.

    NFS clients know numbers of earlier catalogs at the same mount point, and a handle is only a
    number. No catalog makes more than one inode in each microsecond of its life.
    """
    return time.time_ns() // 1000


def expect_place(catalog: Catalog, place: str) -> None:
    """Raises ConfigError if the catalog has objects in another bucket, or prefix."""
    before = catalog.fact(BUCKET_FACT)
    if before not in {None, place} and any(map(catalog.any_mark, BUCKET_KINDS)):
        raise ConfigError(
            f"s3={place}: the objects of catalog {catalog.path} are in {before}: mount with that, "
            "or give an empty directory to nvme="
        )


def bind(catalog: Catalog, bucket: Bucket | None) -> None:
    """Bind the catalog's objects to this bucket. Raises ConfigError if they are in another.

    After a mount without a bucket, the next mount with it looks for objects sealed meanwhile.
    """
    place = None if bucket is None else str(bucket.place)
    if place is not None:
        expect_place(catalog, place)
    changes = catalog.fact(CAUGHT_UP) if place is None else catalog.fact(BUCKET_FACT) != place
    if changes:
        with catalog.batch() as batch:
            if place is not None:
                batch.set_fact(BUCKET_FACT, place)
            batch.set_fact(CAUGHT_UP, "")


def _what_is_left(catalog: Catalog) -> str:
    """Say what a killed session has left, on a machine that did not go down."""
    if catalog.doubt:
        return "names may be missing, its bytes stay for kvfs fsck --repair"
    if catalog.recovered.taken:
        return "its log was damaged, what was missing is restored"
    return "its bytes are all there"


def begin_session(
    catalog: Catalog,
    ram: RamTier | None,
    nvme: NvmeTier | None,
    *,
    bucket: Bucket | None = None,
    takeover: bool,
    invalidate_name: InvalidateName,
) -> Ledger:
    """Number this session, and find the suspect sessions: those that a power loss may have hurt.

    If the machine went down, or the disk was mounted anew, all sessions after the last proper end
    are suspect. The bytes of a suspect session may not have reached the disk, even if the file
    system says so.
    """
    last, ended, same_mount, low, high = past_sessions(catalog)
    goes_on = takeover and same_mount
    if ended < last and not goes_on:
        log.warning(
            "the last session did not end properly: %s",
            _what_is_left(catalog) if same_mount else "copies are verified before use",
        )
    ledger = Ledger(
        catalog,
        Tiers(ram, nvme, bucket),
        session=last if goes_on else last + 1,
        suspect=range(low, high + 1),
        invalidate_name=invalidate_name,
    )
    doubts.load(ledger.records)
    with catalog.batch() as batch:
        batch.set_fact("session", str(ledger.session))
        batch.set_fact("suspect", f"{low} {high}")
        batch.set_fact("boot", mounted_as(catalog))
        if ram is not None:
            batch.set_fact("ram_epoch", str(ram.epoch))
        batch.sync = True
        if takeover:
            catalog.answers.load(catalog.answer_entries())
        else:
            batch.forget_answers()
    Tree(ledger).make_root(uid=os.geteuid(), gid=os.getegid())
    # The census counts all objects with smaller numbers.
    ledger.trash.first_new = ledger.accounts.first_new = catalog.next_id()
    if not takeover:
        recovery.drop_unfinished(ledger)
    return ledger
