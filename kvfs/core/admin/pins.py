"""Files that are not dropped because somebody said so: `kvfs pin`, `user.kvfs.pin`.

Contract: a pin is the attribute PIN of a file in the catalog, and `Inode.kept` with it, in one
batch: an earlier kvfs reads both, and keeps the file until it is renamed. A pinned file is in the
orders of what only its owner unlinks, so it may leave RAM, and is never dropped to make room, nor
with its group. It stays pinned when it is written again or renamed; what is renamed over it is not.
Time to live and unlink end it as ever. Synchronous. Not for namespaces: their setting `pin` holds
objects in RAM as well.
"""

from functools import partial
from typing import Any

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.places import PIN
from kvfs.errors import InvalidError


def pin(ledger: Ledger, inode: Inode, *, on: bool) -> bool:
    """Whether that changed anything. Raises InvalidError for what is no file, CatalogError."""
    if not inode.is_file:
        raise InvalidError(f"inode {inode.ino} is no file: files are pinned, and namespaces")
    if ledger.namespaces.places.is_pinned(inode) == on:
        return False
    before = inode.copy()
    inode.kept = on or ledger.namespaces.places.keeps(inode)
    with ledger.catalog.batch() as batch:
        if on:
            batch.set_xattr(inode.ino, PIN, b"on")
        else:
            batch.remove_xattr(inode.ino, PIN)
        batch.put(inode)
        batch.answers()
        if inode.kept != before.kept and ledger.accounts.accounted(inode):
            batch.then(partial(ledger.accounts.dismiss, before))
            batch.then(partial(ledger.accounts.count_anew, inode))
    return True


class Pins:
    """The visitor of a tree."""

    def __init__(self, ledger: Ledger, *, on: bool) -> None:
        self.ledger = ledger
        self.on = on
        self.changed = self.refused = 0
        self.why: dict[str, int] = {}

    def visit(self, inode: Inode) -> None:
        if not self.ledger.removals.is_gone(inode):
            self.changed += pin(self.ledger, inode, on=self.on)

    def failed(self, inode: Inode, error: Exception) -> None:  # noqa: ARG002 (a visitor's)
        self.refused += 1
        self.why[str(error)] = self.why.get(str(error), 0) + 1

    def describe(self) -> dict[str, Any]:
        return {"changed": self.changed, "refused": self.refused, "why": self.why}
