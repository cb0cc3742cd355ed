"""Keys at which the bucket has what nobody means by them: to be deleted, or still to be copied.

Contract: a key is superseded when the object that it was for is gone, has another version, or has
another name by now. If nobody needs what is there it is one of `deletes`, by a mark (`z`) that
changes in the batch that supersedes it; what goes up there anew settles it. If it is one of
`claims`, an object that is dirty or being written is in the bucket there and nowhere else: nothing
else may go to that key before that one has gone elsewhere. Claims are not stored: they follow from
the marks of what is dirty or unfinished. Whoever asked the bucket meanwhile learns of each key that
was settled (`watching`).
All of it is synchronous; memory follows the commit, so that between any two awaits, once all is
loaded, `deletes` is what the marks say.
Not for deleting: `core/bucket/upload/deletion.py`; nor for what is dirty: `core/ledger/dirty.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvfs.catalog import Batch, Catalog, keys


class Superseded:
    """`deletes` are the keys to delete with their marks, `claims` those taken, by which inode."""

    def __init__(self, catalog: Catalog, wake: Callable[[], None] | None) -> None:
        """wake: is told that there is something to delete; None: no bucket is mounted."""
        self.catalog = catalog
        self.deletes: dict[str, set[int]] = {}
        self._attempts: dict[int, str] = {}  # by mark: those that only delete what one has made
        self.claims: dict[str, int] = {}
        self._claimed: dict[int, str] = {}  # the other way round
        self._watching: list[set[str]] = []
        self._wake = wake

    # What others may find there

    def __contains__(self, key: str) -> bool:
        """Whether what is at a key is about to go from there: nobody means it by its name."""
        return key in self.deletes or key in self.claims

    def folders(self, prefix: str) -> set[str]:
        """The folders right below a prefix in which something is about to go."""
        ours = [key for key in (*self.deletes, *self.claims) if key.startswith(prefix)]
        return {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in ours}

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Gives the keys that were deleted or uploaded meanwhile: what is told of them is old."""
        gone: set[str] = set()
        self._watching.append(gone)
        try:
            yield gone
        finally:
            self._watching = [other for other in self._watching if other is not gone]

    # To be deleted

    def delete(self, key: str, batch: Batch) -> None:
        """The bucket has what nobody means any more."""
        number = self.catalog.next_id()
        batch.mark(keys.DELETED, number, key.encode())
        batch.then(partial(self._to_delete, key, number))

    def attempt(self, key: str, token: str, batch: Batch) -> None:
        """Something is about to go up that nobody may come to mean: then it goes again."""
        number = self.catalog.next_id()
        batch.mark(keys.DELETED, number, f"{key}\0{token}".encode())
        batch.then(partial(self._to_delete, key, number, token))

    def attempts(self, key: str) -> tuple[str, ...]:
        """Those of a key that is to be deleted only if one of them has made what is there."""
        numbers = self.deletes.get(key, set())
        tokens = tuple(self._attempts.get(number, "") for number in numbers)
        return tokens if all(tokens) else ()

    def settle(self, key: str, batch: Batch) -> None:
        """What is there, if anything, is not to be deleted: it is gone, or it is meant."""
        for number in self.deletes.get(key, ()):
            batch.unmark(keys.DELETED, number)
        batch.then(partial(self._forget_delete, key))

    def load(self, number: int, value: bytes) -> None:
        """A mark of an earlier session."""
        key, _, token = value.decode().partition("\0")
        self._to_delete(key, number, token)

    def _to_delete(self, key: str, number: int, token: str = "") -> None:
        if self._wake is not None:
            self.deletes.setdefault(key, set()).add(number)
            if token:
                self._attempts[number] = token
            self._wake()

    def _forget_delete(self, key: str) -> None:
        for gone in self._watching:
            gone.add(key)
        for number in self.deletes.pop(key, ()):
            self._attempts.pop(number, None)

    # Taken

    def claimed(self, ino: int) -> bool:
        """Whether an inode has a claim."""
        return ino in self._claimed

    def claim(self, ino: int, key: str) -> None:
        """The bucket has an inode there, by another name or in another version; nowhere else."""
        self.disclaim(ino)
        self.claims[key] = ino
        self._claimed[ino] = key

    def disclaim(self, ino: int) -> None:
        """Nothing of it is at a key that another may want."""
        key = self._claimed.pop(ino, None)
        if key is not None and self.claims.get(key) == ino:
            del self.claims[key]
