"""Which requests of the kernel have been carried out: what makes a change happen once.

Contract: a change of names writes the number of its request into its own batch (`Batch.answers`).
If the daemon dies before it has replied, the kernel sends the request again to the next one, which
finds it here and only replies. Entries are few: one for each change under way at the same time, and
overwritten by later ones. Request numbers rise for as long as a mount lives and are never reused.

Key: ANSWERS index; value: request, inode that it made or 0.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from struct import Struct

from kvfs.catalog.keys import ANSWERS

_KEY = Struct(">cI")
_VALUE = Struct("<QQ")
_current: ContextVar[tuple[int, int] | None] = ContextVar("_current", default=None)


class Answers:
    """`known` has what the predecessor carried out, request -> inode, until `forget`."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        self._reserved = 0  # entries of the predecessor must not be overwritten yet

    def load(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over the entries, (key, value), of a daemon that died."""
        for key, value in entries:
            request, ino = _VALUE.unpack(value)
            self.known[request] = ino
            self._end = max(self._end, _KEY.unpack(key)[1] + 1)
        self._reserved = self._end

    def forget(self) -> None:
        """All that comes again has come."""
        self.known.clear()
        self._free.extend(range(self._reserved))
        self._reserved = 0

    @contextmanager
    def carrying_out(self, request: int) -> Iterator[None]:
        """The task's batch that says `answers()` is the one that carries the request out.

        Left before the reply, which must follow without an await.
        """
        if self._free:
            index = self._free.pop()
        else:
            index, self._end = self._end, self._end + 1
        token = _current.set((index, request))
        try:
            yield
        finally:
            _current.reset(token)
            self._free.append(index)

    @staticmethod
    def entry(ino: int) -> tuple[bytes, bytes] | None:
        """Key and value for the request that this task carries out, None if it is for none."""
        current = _current.get()
        if current is None:
            return None
        index, request = current
        return _KEY.pack(ANSWERS, index), _VALUE.pack(request, ino)
