"""What the catalog says of the bucket: where objects are there, what waits, what is to be deleted.

Contract: `check_inode` is asked of every inode, and costs a look-up for those that are in the
bucket; `run` looks at the marks. Nothing is asked of the bucket itself (`listed`): whether it has
what it should shows when that is opened. What it has of an inode that is no more is deleted there.
"""

from functools import partial

from kvfs.catalog import Inode, audit, keys
from kvfs.core.check.survey import Survey


class Stored:
    """Of the objects of a catalog."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.catalog = survey.catalog
        self.ledger = survey.ledger

    def check_inode(self, inode: Inode) -> None:
        """Whether something says where in the bucket it is."""
        if not inode.in_bucket or self._good(inode.ino):
            return
        here = bool(self.ledger.tiers.holders(inode))
        if inode.ino in self.ledger.table.open or inode.ino in self.ledger.table.busy:
            return  # a look at another time
        self.survey.report(
            "stored",
            inode.ino,
            self.survey.path(inode),
            "it is in the bucket, but nothing says where",
            "take it for not being there" if here else "drop it with its names",
            partial(self._take, inode, here=here),
        )

    def _good(self, ino: int) -> bool:
        value = self.catalog.record(keys.STORED, keys.number_key(ino))
        return value is not None and audit.stored(value) is not None

    def _take(self, inode: Inode, *, here: bool) -> None:
        with self.catalog.batch() as batch:
            batch.erase(keys.STORED, keys.number_key(inode.ino))
        if here:
            self.ledger.records.take_from_bucket(inode)
        else:
            self.ledger.removals.drop(inode, "lost")

    async def run(self) -> None:
        """All marks. A key that is to be deleted may be any text: it is only ever deleted."""
        survey = self.survey
        survey.begin("bucket", 0)
        for kind in (keys.STORED, keys.UNSTORED, keys.CONTESTED, keys.DELETED):
            for key, _ in self.catalog.records(kind):
                value = self.catalog.record(kind, key)
                if value is not None:
                    self._check_mark(kind, key, value)
                await survey.step()

    def _check_mark(self, kind: bytes, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        inode = None if ino is None else self.survey.inode(ino)
        good = {
            keys.STORED: audit.stored(value) is not None,
            keys.UNSTORED: len(value) == keys.U64.size,
            keys.CONTESTED: len(value) == keys.U64.size,
            keys.DELETED: audit.deleted(value) is not None,
        }[kind]
        if ino is None or not good:
            what = f"a mark about the bucket makes no sense (key {(kind + key).hex()})"
            self._report(ino or 0, inode, what, partial(self._erase, kind, key))
        elif kind != keys.DELETED and ino not in self.survey.unreadable:
            fits = inode is not None and inode.is_file
            if kind != keys.STORED and inode is not None:
                fits = fits and inode.sealed and bool(inode.links)
            if not fits and not self.survey.in_use(ino) and not self.survey.to_be_recovered(ino):
                what = "the bucket has, or is to get, what is no file any more"
                self._report(ino, inode, what, partial(self._gone, ino))

    def _report(self, ino: int, inode: Inode | None, what: str, mend: "partial[None]") -> None:
        path = "" if inode is None else self.survey.path(inode)
        self.survey.report("bucket", ino, path, what, "remove the mark", mend)

    def _erase(self, kind: bytes, key: bytes) -> None:
        with self.catalog.batch() as batch:
            batch.erase(kind, key)

    def _gone(self, ino: int) -> None:
        with self.catalog.batch() as batch:
            self.ledger.dirty.gone(ino, batch)
