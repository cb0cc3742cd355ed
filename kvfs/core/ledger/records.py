"""The records of sealed objects without a writer: copies gained and lost, one commit each.

Contract: synchronous. The record is committed first; its consequences (accounts, lists, files)
follow by `Batch.then`. A crash between the two leaves files without a record, never a name without
its file. A commit that fails has changed nothing. A copy that may be wrong is distrusted: no open
is served from it before its digest was compared. Not for objects that go (`removals`).
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
    """Records of objects that keep a copy in some tier, if only in the bucket."""

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
        # Inodes that lost a wrong copy: the kernel may have wrong bytes of them in its cache.
        self.uncached: set[int] = set()

    def is_lost(self, inode: Inode) -> bool:
        """Whether no tier holds the bytes of this file any more: the RAM tier went away."""
        if not inode.is_file or inode.in_bucket or inode.ino in self.table.open:
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
        """Record a copy that a mover has made. The caller gives back the room it reserved for it.

        packed: the copy is this packed one, on NVMe. A plain copy replaces a packed one.
        """
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            self.tiers.set_holder(inode, tier, holds=True)
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
        """Record that the bucket has an object. clean: under the name that it has now."""
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.digest = digest
            self.dirty.uploaded(inode, stored, batch, clean=clean)
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def take_from_bucket(
        self, inode: Inode, *, dirty: bool = False, contested: bool = False, delete: bool = True
    ) -> None:
        """Record that a resident object is not in the bucket any more.

        With `delete` the key in the bucket is ours, and goes. With `dirty` the object is to be
        uploaded again. With `contested` it is, once no other node has its name.
        """
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.in_bucket = False
            self.dirty.unlinked(inode.ino, batch, delete=delete)
            if dirty:
                self.dirty.lacking(inode, batch)
            elif contested:
                self.dirty.contest(inode.ino, batch)
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def described(self, before: Inode, inode: Inode) -> None:
        """Account the size of an object that only the bucket has, now that it is known."""
        self.accounts.account_changed_copies(before, inode)

    def drop_copy(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        """Remove one copy of an object; another copy stays, if only in the bucket."""
        space = self.accounts.namespaces.of(inode)
        away = partial(self.trash.throw_away, space=space, keep=quarantine, why=why)
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            self.tiers.set_holder(inode, tier, holds=False)
            batch.put(inode)
            batch.then(partial(away, tier, inode.ino, inode.version))
            batch.then(partial(self.accounts.account_changed_copies, before, inode))

    def distrust(self, inode: Inode, tier: Tier) -> None:
        """Distrust a copy that is known to be wrong while the catalog still has it.

        The next open compares the copy, and without a digest takes it for lost. kvfs makes no copy
        of a distrusted one without a digest. Handles that read the copy read on. No other open
        succeeds before they are closed.
        """
        self.verified.doubt(inode.ino, inode.version, tier.name)
        held = self.table.open.get(inode.ino)
        if held is not None and held.reads(tier):
            held.lost = True

    def is_distrusted(self, inode: Inode) -> bool:
        """Whether its bytes may be wrong, and no digest can tell. kvfs makes no copy of such bytes.

        Either a check found a copy wrong, or NVMe alone has the object and a power loss followed
        its seal.
        """
        if inode.digest:
            return False
        holders = self.tiers.holders(inode)
        if holders == [self.tiers.nvme] and inode.session in self.suspect:
            return True
        return any(
            (inode.ino, inode.version, tier.name) in self.verified.doubted for tier in holders
        )
