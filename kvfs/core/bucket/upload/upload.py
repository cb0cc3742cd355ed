"""Uploads one object to one key, and decides what each answer of the store means.

Contract: a record says that the bucket has its object only after the bucket has it, in one batch
with all consequences. If the object has changed meanwhile, the record names the uploaded bytes as
an older version, or kvfs deletes them again. Before the first upload to a key, the upload is noted
as an attempt. If another node has published the name first, that node keeps it in the bucket. The
object then stays on this node only (`contested`). The caller keeps the object in `jobs` during the
upload. It also locks the key, unless the key is new. Anything else may change, so this module looks
the record up again after each await. Not for the order of uploads, nor for the choice of the key
(`uploader`).
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvfs import failpoints
from kvfs.catalog import Inode, Stored
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.bucket.upload.backoff import Backoff
from kvfs.core.capacity.quota import Quota
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import TierTransfers
from kvfs.movement import uploading
from kvfs.movement.files import SourceChangedError
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.movement.remote import Remote
from kvfs.s3.errors import (
    NoObjectError,
    ObjectChangedError,
    ObjectExistsError,
    SourceError,
    StoreError,
    WrongBytesError,
)
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

BUSY_DELAY = 0.05  # s until the next try of an object that a program writes
FAILURE_DELAY = 10.0  # s until the next try after a failure of the object


class Later(NamedTuple):
    """The object stays dirty, and is tried again after so many seconds."""

    seconds: float


class UploadSender:
    """Uploads objects. `notes` is the directory for ids of uploads."""

    def __init__(
        self,
        transfers: TierTransfers,
        quota: Quota,
        remote: Remote,
        backoff: Backoff,
        *,
        notes: str,
        fetch_metadata: Callable[[int], Awaitable[Inode | None]],
    ) -> None:
        """fetch_metadata: fetches the metadata of a stub; None if that is impossible."""
        self.ledger: Ledger = transfers.ledger
        self.transfers = transfers
        self.quota = quota
        self.remote = remote
        self.bucket = remote.bucket
        self.backoff = backoff
        self.dirty = self.ledger.dirty
        self.superseded = self.dirty.superseded
        self._notes = notes
        self._fetch_metadata = fetch_metadata

    def target(self, key: str, record: tuple[str, bytes] | None, stored: Stored | None) -> Target:
        """The target of an upload. Notes a first upload to the key. Raises CatalogError.

        Without the note, an object in the bucket could stay unknown to every node: the store's
        answer is lost, and then a program renames or unlinks the object.
        """
        superseded, token = self.superseded, uuid.uuid4().hex
        ours = superseded.attempts(key)
        if (
            (stored is not None and stored.key == key)
            or (key in superseded.deletes and not ours)
            or self.bucket.gives_wrong_bytes(key)
        ):
            return Target(key, record, once=False, token=token)
        with self.ledger.catalog.batch() as batch:
            superseded.attempt(key, token, batch)
        return Target(key, record, once=True, token=token, ours=ours)

    async def send(self, inode: Inode, stored: Stored | None, target: Target) -> Later | None:
        """Upload the object, or copy it in the bucket. Returns None when the object is done.

        Raises StoreError, TierError, OSError, CatalogError.
        """
        if is_stub(inode):  # the new key needs all its metadata
            return Later(FAILURE_DELAY if await self._fetch_metadata(inode.ino) is None else 0.0)
        holders, named = self.ledger.tiers.holders(inode), self.ledger.catalog.named(inode.ino)
        copied = inode.in_bucket and stored is not None
        source = None if copied else self._source(inode, holders)
        if not copied and source is None:
            self.skip_upload(inode, wanted=True)
            return None
        try:
            if source is None:
                assert stored is not None
                about = self._about(inode)
                uploaded = await self.remote.call(
                    "up", about.size, (), uploading.copy, stored, about, target, self._notes
                )
            else:
                path = source.path(inode.ino, inode.version)
                about, scratch = self._about(inode), self._scratch(inode)
                copy = inode.packed if self.ledger.tiers.is_packed_in(inode, source) else None
                arguments = path, inode.backing_mtime_ns, about, target, self._notes, scratch, copy
                uploaded = await self.remote.call(
                    "up", about.size, (), uploading.upload, *arguments
                )
        except ObjectExistsError as error:
            if self.ledger.namespaces.unaccounted:  # perhaps ours, of a directory that moved
                return Later(FAILURE_DELAY)
            return self._conflict(inode, stored, target.key, error)
        except (NoObjectError, ObjectChangedError) as error:
            if not copied or stored is None:  # another node was faster
                log.info("%s is to be uploaded once more: %s", named, error)
                return Later(FAILURE_DELAY)
            return self._vanished(inode, stored, error)
        except SourceChangedError as error:
            if self.transfers.still_current(inode.ino, inode.version) is not None:
                raise
            log.debug("%s was written while it went up, and goes up again: %s", named, error)
            return Later(BUSY_DELAY)
        except WrongBytesError as error:  # damaged on its way, too often
            log.warning("%s is not uploaded yet, kvfs tries again: %s", named, error)
            return Later(FAILURE_DELAY)
        except SourceError as error:
            current = self.transfers.still_current(inode.ino, inode.version)
            if current is not None and source and source in self.ledger.tiers.holders(current):
                log.error("%s is not uploaded, its copy is wrong: %s", named, error)
                self.transfers.lose_rotten(current, source)
                return Later(BUSY_DELAY)
            return Later(FAILURE_DELAY)
        except FileNotFoundError:
            current = self.transfers.still_current(inode.ino, inode.version)
            if current is not None and source in self.ledger.tiers.holders(current):
                raise
            return Later(BUSY_DELAY)  # it was evicted, and another tier has it
        failpoints.reach("dispatcher.uploaded")
        self._enter(inode, uploaded, copied=copied)
        self.backoff.worked()
        return None

    def _source(self, inode: Inode, holders: list[Tier]) -> Tier | None:
        """The tier to upload from: one with a packed copy if it need not be packed again.

        Otherwise the fastest.
        """
        packed = next((one for one in holders if self.ledger.tiers.is_packed_in(inode, one)), None)
        wanted = packed is not None and not packed.health.down
        if wanted and self._scratch(inode) is not None:
            return packed
        return holders[0] if holders else None

    def _scratch(self, inode: Inode) -> str | None:
        """The directory for compression, "" for memory only; None if the namespace has it off.

        Without NVMe the notes are in memory, which large objects must not fill.
        """
        if self.ledger.namespaces.of(inode).settings.compression == "off":
            return None
        return self._notes if self.ledger.tiers.nvme.mounted else ""

    def _about(self, inode: Inode) -> About:
        models = self.ledger.namespaces.places.models
        engine_and_model = models.get(inode.model, ("", ""))
        return About(
            inode.size,
            inode.digest,
            inode.mtime_ns,
            inode.mode,
            inode.uid,
            inode.gid,
            inode.key,
            inode.parent_key,
            engine_and_model[1],
            inode.attributes,
            self.ledger.namespaces.places.element_size(inode),
        )

    def _enter(self, inode: Inode, uploaded: Uploaded, *, copied: bool) -> None:
        """Record that the bucket has the object. After a CatalogError kvfs uploads it again."""
        ledger, dirty, key = self.ledger, self.dirty, uploaded.stored.key
        counters = self.bucket.counters
        self.bucket.forget_wrong_bytes(key)
        counters["copies" if copied else "uploads"] += 1
        counters["upload_bytes"] += 0 if copied else uploaded.stored.size
        if uploaded.packing is not None:
            size = uploaded.stored.size
            self.transfers.count_packing(inode, self.bucket, uploaded.packing, size)
        current = self.transfers.still_current(inode.ino, inode.version)
        if current is not None:
            clean = dirty.key(current) == key and uploaded.stored.attributes == current.attributes
            ledger.records.add_stored(current, uploaded.stored, uploaded.digest, clean=clean)
            self.quota.trim(ledger.namespaces.of(current))  # the namespace may evict it now
            return
        changed = ledger.table.inode(inode.ino)
        with ledger.catalog.batch() as batch:
            if changed is not None and changed.links and changed.version != inode.version:
                dirty.on_older_upload(inode.ino, uploaded.stored, batch)
            else:
                self.superseded.delete(uploaded.stored, batch)

    def skip_upload(self, inode: Inode, *, wanted: bool) -> None:
        """End the work on an object that needs no upload.

        wanted: the bucket may keep the object. If not, and this node has a copy, kvfs deletes the
        object from the bucket.
        """
        ledger = self.ledger
        if wanted or self.dirty.stored(inode.ino) is None or not ledger.tiers.holders(inode):
            with ledger.catalog.batch() as batch:
                self.dirty.unmark(inode.ino, batch)
        else:
            ledger.records.record_not_in_bucket(inode)

    def _conflict(
        self, inode: Inode, stored: Stored | None, key: str, error: ObjectExistsError
    ) -> Later | None:
        """Handle a name that another node has published: this version stays on this node only.

        That lasts until the other node's object goes. If the bucket has this version at another
        key, kvfs deletes that key. If this node then has no copy, the object goes, and its name
        means the other node's object.
        """
        ledger, counters = self.ledger, self.bucket.counters
        current = self.transfers.still_current(inode.ino, inode.version)
        if current is not None and not ledger.tiers.holders(current) and self._in_use(current.ino):
            return Later(FAILURE_DELAY)
        renamed = current is not None and self.dirty.key(current) not in {key, None}
        if renamed:  # the next upload uses its new name
            with ledger.catalog.batch() as batch:
                self.superseded.unmark(key, batch)
            return Later(0.0)
        counters["conflicts"] += 1
        log.log(
            logging.WARNING if counters["conflicts"] == 1 else logging.DEBUG,
            "%s stays on this node only: %s (said once)",
            *(ledger.catalog.named(inode.ino), error),
        )
        with ledger.catalog.batch() as batch:
            self.superseded.unmark(key, batch)  # the object at the key is not ours
            if current is not None and stored is None:
                self.dirty.contest(inode.ino, batch)
        if current is None or stored is None:
            return None
        if ledger.tiers.holders(current):
            ledger.records.record_not_in_bucket(current, contested=True)
        else:
            ledger.removals.let_go(current, delete=True)
        return None

    def _in_use(self, ino: int) -> bool:
        return ino in self.ledger.table.open or ino in self.ledger.table.busy

    def _vanished(self, inode: Inode, stored: Stored, error: StoreError) -> Later | None:
        """Handle an object that another node unlinked or replaced before a copy in the bucket.

        The copy was to give it another key or other metadata. If this node has renamed the object
        and has a copy, kvfs uploads it with its new name. Otherwise the object loses all its
        names here, as always when another node unlinks or replaces an object.
        """
        current = self.transfers.still_current(inode.ino, inode.version)
        if current is None:
            return Later(BUSY_DELAY)
        log.log(
            logging.INFO if self.bucket.shared else logging.WARNING,
            "%s: the bucket has another object at its key, or none: %s",
            *(self.ledger.catalog.named(inode.ino), error),
        )
        meant = self.dirty.key(current) != stored.key or not self.bucket.shared
        if meant and self.ledger.tiers.holders(current):
            self.ledger.records.record_not_in_bucket(current, dirty=True, delete=False)
            return Later(0.0)
        if self._in_use(current.ino):
            return Later(FAILURE_DELAY)
        self.ledger.removals.let_go(current)
        return None
