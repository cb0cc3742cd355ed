"""The records of sealed objects without a writer: copies gained and lost, one commit each.

Contract: synchronous. The record is committed first, and its consequences (accounts, lists, files)
by `Batch.then`: a crash between the two leaves files that nothing names, never a name without its
file, and a commit that fails has changed nothing. A copy that may be wrong is distrusted: no open
is served from it before its digest was compared. Not for objects that go (`removals`).
"""

from functools import partial

from kvfs.catalog import Catalog, Inode, PackedCopy, Stored
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.trash import Trash
from kvfs.core.ledger.verified import Verified
from kvfs.tiers import Tier


class Records:
    """Of objects that keep a copy somewhere, if only in the bucket."""

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
        self.verified = Verified()
        # Copies of them were given up: what the kernel has of their bytes may be wrong.
        self.uncached: set[int] = set()

    def is_lost(self, inode: Inode) -> bool:
        """Whether nothing holds the bytes of this file any more: the RAM tier went away."""
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
        """A mover has made a copy. What the caller had reserved for it, the caller gives back.

        packed: it is this one, on NVMe. A plain one takes the place of a packed one.
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
            batch.then(partial(self.accounts.held_otherwise, before, inode))
        if tier is self.tiers.nvme:
            self.verified.note(inode.ino)

    def add_stored(self, inode: Inode, stored: Stored, digest: bytes, *, clean: bool) -> None:
        """The bucket has it; `clean`: as it is called now."""
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.digest = digest
            self.dirty.uploaded(inode, stored, batch, clean=clean)
            batch.put(inode)
            batch.then(partial(self.accounts.held_otherwise, before, inode))

    def take_from_bucket(
        self, inode: Inode, *, dirty: bool = False, contested: bool = False, delete: bool = True
    ) -> None:
        """A copy is here, and what the bucket has is not to be there; `delete`: it is ours.

        dirty: it is to be there again; contested: when no other node has its name any more.
        """
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            inode.in_bucket = False
            self.dirty.gone(inode.ino, batch, delete=delete)
            if dirty:
                self.dirty.lacking(inode, batch)
            elif contested:
                self.dirty.contest(inode.ino, batch)
            batch.put(inode)
            batch.then(partial(self.accounts.held_otherwise, before, inode))

    def described(self, before: Inode, inode: Inode) -> None:
        """More is known of what only the bucket has: its size, for the accounts."""
        self.accounts.held_otherwise(before, inode)

    def drop_copy(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        """One copy goes, another one stays, if only in the bucket."""
        space = self.accounts.namespaces.of(inode)
        away = partial(self.trash.throw_away, space=space, keep=quarantine, why=why)
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            self.tiers.set_holder(inode, tier, holds=False)
            batch.put(inode)
            batch.then(partial(away, tier, inode.ino, inode.version))
            batch.then(partial(self.accounts.held_otherwise, before, inode))

    def distrust(self, inode: Inode, tier: Tier) -> None:
        """A copy is known not to be what it should be, and the catalog has it yet.

        The next open compares it, and without a digest takes it for lost. Nobody makes a copy of
        one without a digest. Handles that read it read on, and nobody else opens it before they
        are closed.
        """
        self.verified.doubt(inode.ino, inode.version, tier.name)
        held = self.table.open.get(inode.ino)
        if held is not None and held.reads(tier):
            held.lost = True

    def is_distrusted(self, inode: Inode) -> bool:
        """Whether its bytes may be wrong, and no digest can tell: no copy is made of them.

        A check found a copy wrong; or NVMe alone has it, and a power loss came after it was sealed.
        """
        if inode.digest:
            return False
        holders = self.tiers.holders(inode)
        if holders == [self.tiers.nvme] and inode.session in self.suspect:
            return True
        return any(
            (inode.ino, inode.version, tier.name) in self.verified.doubted for tier in holders
        )
