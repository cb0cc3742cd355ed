"""Names that a program here has just unlinked or renamed, while the index still has them.

Contract: synchronous. `hides` says whether an answer of the index would bring such a name back. A
change may reach the index 20 ms late, or much later if the index is down. An answer on its way may
be LEFT_S older than the change.
"""

from kvfs.core.bucket.listing.bucket_lookup import LastSeen

LEFT_S = 2.0  # s after the index has learned of it: the longest wait for an answer of the index


class Leaving:
    """The keys of objects that change or leave."""

    def __init__(self) -> None:
        self._pending: dict[str, int] = {}  # keys, and the inodes that had them
        self._left: LastSeen[tuple[str, bytes]] = LastSeen()

    def changes(self, key: str, ino: int) -> None:
        """Note that an object with this key may lose it."""
        self._pending[key] = ino

    def stays(self, key: str) -> None:
        """Note that the key stays with other nodes, or has an object again."""
        self._pending.pop(key, None)

    def announced(self, key: str, digest: bytes) -> None:
        """Note that the index has this object, from here."""
        self._left.forget((key, digest))

    def told(self, key: str, ino: int, digest: bytes, *, gone: bool) -> None:
        """Note that the index has learned of a change. gone: the object was unlinked."""
        if self._pending.get(key) == ino:
            del self._pending[key]
        if gone:
            self._left.note((key, digest))

    def hides(self, key: str, digest: bytes) -> bool:
        """Whether an object of the index is the one that left."""
        return key in self._pending or self._left.age((key, digest)) < LEFT_S
