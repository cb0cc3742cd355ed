"""Recovery: settles the inodes that a dead session left unfinished, before the first operation.

Contract: an inode is marked unfinished in the catalog (`Batch.mark_unfinished`) as long as it is
written, or is open without a name. After a death, kvfs drops marked inodes that are not sealed or
have no name. A sealed one with a name stays as it was: it was about to be written, but no program
had a handle for that yet. After a power loss the newest records may be missing, so its digest has
to tell. The next death may cut recovery short; the next session then does it again.
Not for files that no record names: the census sweeps those.
"""

import os

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger


def drop_unfinished(ledger: Ledger) -> None:
    """Drop or keep each marked inode. Raises CatalogError, TierError."""
    catalog = ledger.catalog
    last = ledger.session - 1
    for ino in catalog.unfinished():
        inode = catalog.inode(ino)
        if inode is not None and not (inode.sealed and inode.links):
            ledger.removals.drop(inode, "unfinished")
            continue
        if inode is not None:
            give_name_back(ledger, inode)
        with catalog.batch() as batch:
            if inode is not None and last in ledger.suspect:
                inode.session = last
                batch.put(inode)
            batch.mark_finished(ino)


def give_name_back(ledger: Ledger, inode: Inode) -> None:
    """Undo a rename: `Objects` renames the file before the first write to a sealed object.

    The record still has the old version, so no writer ever got a handle. Raises TierError.
    """
    for tier in ledger.tiers.holders(inode):
        old, new = (tier.path(inode.ino, inode.version + more) for more in (0, 1))
        if not os.path.exists(old) and os.path.exists(new):
            tier.rename(inode.ino, inode.version + 1, inode.version)
