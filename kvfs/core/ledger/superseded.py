"""Obsolete bucket keys: to be deleted, or copied first.

Contract: a key is superseded when its object is gone, has another version, or has another name by
now. A key that no object needs is in `deletes`. Its mark (`z`) changes in the batch that supersedes
it, and a new upload to the key settles it. A key in `claims` has the only bytes in the bucket of an
object that is dirty or being written. No other upload may go to that key before the object is at
another key. Claims are not stored: they follow from the marks of dirty and unfinished objects. A
task that asked the bucket meanwhile learns of each key that was unmarked (`watching`).
All methods are synchronous; memory follows the commit. So between any two awaits, once all marks
are loaded, `deletes` equals the marks.
Not for deleting: `core/bucket/upload/deletion.py`; nor for what is dirty: `core/ledger/dirty.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvfs.catalog import Batch, Catalog, Stored, keys
from kvfs.s3.facts import OF_DIGEST, OF_ETAG


class Superseded:
    """`deletes`: the keys to delete, with their marks. `claims`: the claimed keys, with inodes."""

    def __init__(self, catalog: Catalog, wake: Callable[[], None] | None) -> None:
        """wake: called when there is a key to delete; None: no bucket is mounted."""
        self.catalog = catalog
        self.deletes: dict[str, set[int]] = {}
        self._attempts: dict[int, str] = {}  # by mark: token of the upload that it is about
        self.claims: dict[str, int] = {}
        self._claimed: dict[int, str] = {}  # the other way round
        self._watching: list[set[str]] = []
        self._wake = wake
        self.others_replace = False  # other nodes may replace what this node has stored: a pool

    # For listings of the bucket

    def __contains__(self, key: str) -> bool:
        """Whether a key is obsolete: its content does not belong to its name."""
        return key in self.deletes or key in self.claims

    def folders(self, prefix: str) -> set[str]:
        """The folders right below a prefix that have obsolete keys."""
        ours = [key for key in (*self.deletes, *self.claims) if key.startswith(prefix)]
        return {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in ours}

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Yield the keys that are deleted or uploaded meanwhile: listings of them are outdated."""
        gone: set[str] = set()
        self._watching.append(gone)
        try:
            yield gone
        finally:
            self._watching = [other for other in self._watching if other is not gone]

    # To be deleted

    def delete(self, stored: Stored, batch: Batch) -> None:
        """Mark the key of a stored object that no name means any more.

        If other nodes may replace it, another object at the key stays there.
        """
        if self.others_replace:
            self.attempt(stored.key, f"{OF_ETAG}{stored.etag}", batch)
            return
        number = self.catalog.next_id()
        batch.mark(keys.DELETED, number, stored.key.encode())
        batch.then(partial(self._to_delete, stored.key, number))

    def attempt(self, key: str, token: str, batch: Batch) -> None:
        """Mark the key of an upload that may end in vain: then its content is deleted again."""
        number = self.catalog.next_id()
        batch.mark(keys.DELETED, number, f"{key}\0{token}".encode())
        batch.then(partial(self._to_delete, key, number, token))

    def delete_of_digest(self, key: str, digest: bytes, batch: Batch) -> None:
        """Mark a key at which another node may have an object that no name means any more.

        digest: of the object. Another one at the key stays there.
        """
        self.attempt(key, f"{OF_DIGEST}{digest.hex()}", batch)

    def attempts(self, key: str) -> tuple[str, ...]:
        """The upload tokens of a key; () if the key is to be deleted in any case.

        With tokens, the key is deleted only if one of these uploads made its content, or if its
        content has the digest or the ETag in a token.
        """
        numbers = self.deletes.get(key, set())
        tokens = tuple(self._attempts.get(number, "") for number in numbers)
        return tokens if all(tokens) else ()

    def uploads(self, key: str) -> bool:
        """Whether an upload to a key may have ended of which no node knows."""
        return any(not one.startswith(OF_ETAG) for one in self.attempts(key))

    def unmark(self, key: str, batch: Batch) -> None:
        """Unmark a key that is not to be deleted: its content is gone, or an object needs it."""
        for number in self.deletes.get(key, ()):
            batch.unmark(keys.DELETED, number)
        batch.then(partial(self._forget_delete, key))

    def load(self, number: int, value: bytes) -> None:
        """Enter a mark of an earlier session."""
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

    # Claims

    def claimed(self, ino: int) -> bool:
        """Whether an inode has a claim."""
        return ino in self._claimed

    def claim(self, ino: int, key: str) -> None:
        """Claim an inode's only key in the bucket, which has another name or another version."""
        self.disclaim(ino)
        self.claims[key] = ino
        self._claimed[ino] = key

    def disclaim(self, ino: int) -> None:
        """End an inode's claim: it is not at a key that another object may want."""
        key = self._claimed.pop(ino, None)
        if key is not None and self.claims.get(key) == ino:
            del self.claims[key]
