"""The records of sealed objects without a writer. Each copy that comes or goes is one commit.

Contract: synchronous. The record is committed first; its consequences (accounts, lists, files)
follow by `Batch.then`. A crash between the two leaves files without a record, never a name without
its file. A commit that fails has changed nothing. A copy that may be wrong is *distrusted*: kvfs
compares its digest before it serves an open from it. Not for dropping objects (`removals`).
"""

from functools import partial

from kvfs.catalog import Catalog, Inode, PackedCopy, Stored
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.trash import Trash
from kvfs.core.ledger.verified import VerifiedTimes
from kvfs.tiers import Tier


class Records:
    """Changes of records of objects that keep a copy in some tier, perhaps only in the bucket."""

    def __init__(
        self,
        tiers: Tiers,
        table: OpenTable,
        accounts: Accounts,
        dirty: Dirty,
        trash: Trash,
        suspect: range,
    ) -> None:
        """suspect: see `Ledger`."""
        self.catalog: Catalog = table.catalog
        self.tiers = tiers
        self.table = table
        self.accounts = accounts
        self.dirty = dirty
        self.trash = trash
        self.suspect = suspect
        self.verified = VerifiedTimes()
        # Inodes that lost a wrong copy: the kernel may have these wrong bytes in its page cache.
        self.stale_in_kernel: set[int] = set()

    def is_lost(self, inode: Inode) -> bool:
        """Whether no tier holds the bytes of this file any more, because a RAM tier is gone."""
        if not inode.is_file or inode.in_bucket or inode.in_pool or self.table.peek(inode.ino):
            return False
        return not self.tiers.holders(inode)

    def add_copy(
        self,
        inode: Inode,
        tier: Tier,
        blocks: int,
        digest: bytes,
        packed: PackedCopy | None = None,
    ) -> None:
        """Record a copy that a mover has made. The caller releases its reservation for the copy.

        blocks: of 512 bytes, that a plain copy takes. packed: the copy is this compressed one, on
        NVMe. A plain copy replaces a compressed one.
        """
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            self.tiers.set_holder(inode, tier, holds=True)
            inode.in_pool = False
            inode.digest = digest
            if packed is None:
                inode.blocks = max(inode.blocks, blocks)
            else:
                inode.packed = packed
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))
        if tier is self.tiers.nvme:
            self.verified.note(inode.ino)

    def add_stored(self, inode: Inode, stored: Stored, digest: bytes, *, clean: bool) -> None:
        """Record that the bucket has an object. clean: under its present name."""
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.digest = digest
            self.dirty.on_upload(inode, stored, batch, clean=clean)
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def record_not_in_bucket(
        self, inode: Inode, *, dirty: bool = False, contested: bool = False, delete: bool = True
    ) -> None:
        """Record that a resident object is not in the bucket any more.

        delete: also delete its key in the bucket, which is this node's. dirty: upload the object
        again. contested: upload the object again once no other node has its name.
        """
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.in_bucket = False
            self.dirty.on_unlink(inode.ino, batch, delete=delete)
            if dirty:
                self.dirty.mark(inode, batch)
            elif contested:
                self.dirty.contest(inode.ino, batch)
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def account_known_size(self, before: Inode, inode: Inode) -> None:
        """Account an object that only the bucket has, once its size is known."""
        self.accounts.account_changed_copies(before, inode)

    def remove_copy(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        """Remove one copy of an object that has another copy, perhaps only in the bucket.

        quarantine: keep the removed file in the quarantine. why: the reason, for the log.
        """
        space = self.accounts.namespaces.of(inode)
        away = partial(self.trash.throw_away, space=space, keep=quarantine, why=why)
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            self.tiers.set_holder(inode, tier, holds=False)
            batch.put(inode)
            batch.then(partial(away, tier, inode.ino, inode.version))
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def distrust(self, inode: Inode, tier: Tier) -> None:
        """Distrust a copy that is known to be wrong while the catalog still has its record.

        The next open compares the copy with its digest. Without a digest, the open treats the copy
        as lost, and kvfs makes no other copy from it. Open handles that read the copy continue to
        read it. No new open succeeds before these handles are closed.
        """
        self.verified.doubt(inode.ino, inode.version, tier.name)
        held = self.table.open.get(inode.ino)
        if held is not None and held.reads(tier):
            held.lost = True

    def is_distrusted(self, inode: Inode) -> bool:
        """Whether an object's bytes may be wrong, and no digest can tell. kvfs does not copy it.

        The cause is a check that found a copy wrong, or a power loss. After a power loss, kvfs
        distrusts an object that only NVMe has and that was sealed in a session before it.
        """
        if inode.digest:
            return False
        holders = self.tiers.holders(inode)
        if holders == [self.tiers.nvme] and inode.session in self.suspect:
            return True
        return any(
            (inode.ino, inode.version, tier.name) in self.verified.doubted for tier in holders
        )
