"""Names that programs here have unlinked, renamed or rewritten, and the index may still have.

Contract: synchronous. `hides` says whether an object of the index would bring such a name back. A
change may reach the index 20 ms late, or much later if the index is down. After the index has lost
its data, other nodes may announce such an object again, so this node tells all of them once more
(`recent`). Times of modification tell an earlier object from one that a program has written since.
An object that this node could not see may have a name, too (`unseen`): if kvfs drops a later object
of the name, the earlier one stays hidden here. At most REMEMBERED names, for an hour. The catalog
has them as well, so that the next daemon knows them: `leaves` writes a name into the batch that
takes it, and `save` writes all else.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from struct import Struct

from kvfs.catalog import Batch, Catalog, keys
from kvfs.pool.index import GONE_S
from kvfs.pool.records import PoolEntry, Unlinked
from kvfs.s3.facts import Facts

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16  # names; 26 MiB with keys of 50 bytes

NO_DIGEST = bytes(16)  # only times tell which objects left
HIDDEN = b"\xff" * 16  # the same, but no program has taken the name: only this node hides objects
_VALUE = Struct(">16sQQ")  # the digest, the time of modification and the time of the loss, both ns


class Leaving:
    """The keys of objects that change, leave, or have left."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._pending: dict[str, int] = {}  # keys, and the inodes that had them
        # By key, the oldest first: the latest object that left, and when: ns since 1970.
        self._left: OrderedDict[str, tuple[Unlinked, int]] = OrderedDict()
        self._unseen: OrderedDict[str, int] = OrderedDict()  # keys, and when: ns since 1970
        self._unsaved: set[str] = set()  # keys whose record in the catalog differs
        # When the index had learned of all that left before this daemon, in ns since 1970
        self._retold_ns: float = math.inf
        self._load()

    def _load(self) -> None:
        """Read what the daemon before this one knew."""
        found: list[tuple[int, Unlinked]] = []
        for name, value in self.catalog.records(keys.LEFT):
            key = name.decode("utf-8", "replace")
            if len(value) == _VALUE.size:
                digest, mtime_ns, when = _VALUE.unpack(value)
                found.append((when, Unlinked(key, digest, mtime_ns)))
            else:
                log.error(
                    "catalog %s: the record of the name %r is invalid", self.catalog.path, key
                )
        for when, left in sorted(found):
            self._left[left.key] = left, when

    def changes(self, key: str, ino: int) -> None:
        """Note that an object with this key may lose it."""
        self._pending[key] = ino

    def stays(self, key: str) -> None:
        """Note that the key stays with other nodes, or has an object again."""
        self._pending.pop(key, None)

    def unseen(self, key: str) -> None:
        """Note that the pool may have an object with this key that could not be seen."""
        self._unseen[key] = time.time_ns()
        self._unseen.move_to_end(key)
        if len(self._unseen) > REMEMBERED:
            self._unseen.popitem(last=False)

    @property
    def any_unseen(self) -> bool:
        """Whether any key may be that of an object that could not be seen."""
        return bool(self._unseen)

    def may_be_unseen(self, key: str) -> bool:
        """Whether the pool may have another object with this key."""
        return not _is_old(self._unseen.get(key, 0))

    def drops(self, key: str, mtime_ns: int, batch: Batch) -> None:
        """Note that a batch drops an object. Earlier ones of its name stay hidden here."""
        left, _ = self._left.get(key, (None, 0))
        digest = HIDDEN if left is None or left.digest == HIDDEN else NO_DIGEST
        self.leaves(Unlinked(key, digest, mtime_ns - 1), batch)

    def leaves(self, indexed: Unlinked, batch: Batch) -> None:
        """Note that a batch takes the name of an object that the index has."""
        latest, when = self._latest(indexed), time.time_ns()
        batch.set_left(latest.key.encode(), _value(latest, when))
        batch.then(partial(self._remember, latest, when))

    def announces(self, key: str, facts: Facts) -> bool:
        """Note that an object is about to be announced, and return whether an earlier one left.

        If that had the same bytes, only its time tells it from this one from now on.
        """
        left, when = self._left.get(key, (None, 0))
        if left is None or facts.mtime_ns <= left.mtime_ns:
            return False
        if facts.digest == left.digest:  # it was written again, with the same bytes
            self._left[key] = left._replace(digest=NO_DIGEST), when
            self._unsaved.add(key)
        return True

    def announced(self, key: str, facts: Facts) -> None:
        """Note that the index has an object of this key that is not hidden.

        If it is one that left before, or an earlier one, a program has given it the name again: it
        would be lost if this node told a new index of what left. Others are remembered while a
        later one is there: all nodes may evict that one.
        """
        left, _ = self._left.get(key, (None, 0))
        if left is not None and facts.mtime_ns <= left.mtime_ns:
            del self._left[key]
            self._unsaved.add(key)

    def still_left(self, some: Sequence[Unlinked]) -> list[Unlinked]:
        """Those that the index is to be told of as they are: no object was announced since."""
        return [one for one in some if self._left.get(one.key, (None, 0))[0] == one]

    def told(self, indexed: Unlinked, ino: int, *, gone: bool) -> None:
        """Note that the index has learned of a change. gone: `indexed` was unlinked there."""
        key = indexed.key
        if self._pending.get(key) == ino:
            del self._pending[key]
        if gone:
            latest = self._latest(indexed)
            if self._left.get(key, (None, 0))[0] != latest:
                self._unsaved.add(key)
            self._remember(latest, time.time_ns())

    def knows(self, key: str) -> bool:
        """Whether an object of this key leaves, or has left."""
        return key in self._pending or key in self._left

    def hides(self, key: str, facts: Facts, entry: PoolEntry | None = None) -> bool:
        """Whether an object is one that left, or an earlier one.

        entry: the answer of the index about it. If the index knew then what left, a program has
        given the name to the object since, perhaps with the same bytes.
        """
        if key in self._pending:
            return True
        left, when = self._left.get(key, (None, 0))
        if left is None or _is_old(when):
            return False
        if entry is not None and entry.gone is not None:
            knew = entry.gone.mtime_ns >= left.mtime_ns
            if knew and entry.asked_ns > max(when, self._retold_ns):
                return False
        return facts.digest == left.digest or facts.mtime_ns <= left.mtime_ns

    def retold(self) -> None:
        """Note that the index knows all names that left before this daemon, or a loss of it."""
        self._retold_ns = time.time_ns()

    def any_below(self, folder: str) -> bool:
        """Whether the index may list a name in a folder yet that has just left."""
        return any(key.startswith(folder) for key in self._pending)

    def recent(self) -> Iterator[Unlinked]:
        """The objects whose names programs have taken, the latest first."""
        for left, when in reversed(self._left.values()):
            if _is_old(when):
                return
            if left.digest != HIDDEN:
                yield left

    def save(self) -> None:
        """Write what the catalog lacks, and forget names after an hour. Raises CatalogError."""
        while self._left and _is_old(next(iter(self._left.values()))[1]):
            self._unsaved.add(self._left.popitem(last=False)[0])
        if not self._unsaved:
            return
        with self.catalog.batch() as batch:
            for key in self._unsaved:
                left, when = self._left.get(key, (None, 0))
                if left is None:
                    batch.erase(keys.LEFT, key.encode())
                else:
                    batch.set_left(key.encode(), _value(left, when))
            batch.then(self._unsaved.clear)

    def _latest(self, left: Unlinked) -> Unlinked:
        """Of this object and one that lost the name before, the later one."""
        before, _ = self._left.get(left.key, (left, 0))
        return max(before, left, key=lambda one: one.mtime_ns)

    def _remember(self, left: Unlinked, when: int) -> None:
        self._left[left.key] = left, when
        self._left.move_to_end(left.key)
        if len(self._left) > REMEMBERED:
            self._unsaved.add(self._left.popitem(last=False)[0])


def _value(left: Unlinked, when: int) -> bytes:
    return _VALUE.pack(left.digest, max(0, left.mtime_ns), when)


def _is_old(when: int) -> bool:
    return time.time_ns() - when > GONE_S * 10**9
