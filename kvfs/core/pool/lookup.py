"""Lookups in the index of the pool: names that are not known here.

Contract: `find` enters what the index says of a name, if a live node has it. It returns within the
patience of the index (0.1 s) and raises nothing. An index that does not answer counts as empty for
QUIET seconds. Absence is believed for VALID seconds. Questions that come together go together
(`kvfs.pool.connection`); one question about a key at a time, for all callers.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import trio

from kvfs.catalog import ROOT_INO
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.pool.entries import PoolEntries
from kvfs.core.pool.marks import SeenMarks
from kvfs.core.pool.peers import Peers
from kvfs.core.shared_work import start_task
from kvfs.errors import CatalogError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import PATIENCE, Index
from kvfs.pool.records import GoneEntry, Owner, PoolEntry
from kvfs.s3.facts import Facts
from kvfs.s3.keys import escape

log = logging.getLogger(__name__)

QUIET = 1.0  # s without questions after one without an answer
VALID = 0.05  # s for which absence is believed: a question costs 50 us, a program may poll
REMEMBERED = 1 << 16  # answers
AT_ONCE = 64  # objects in one question


class PoolLookup:
    """Looks up names in one pool."""

    def __init__(self, index: Index, entries: PoolEntries, peers: Peers) -> None:
        self.index = index
        self.entries = entries
        self.peers = peers
        self.few_nodes: Callable[[], list[str] | None] = lambda: None
        self.counters = Counter({"lookups": 0, "found": 0, "absent_cached": 0, "failures": 0})
        self.found: OrderedDict[str, PoolEntry] = OrderedDict()  # the last answers, by key
        self._gone: OrderedDict[str, GoneEntry] = OrderedDict()  # the last answers of this kind
        self.marks = SeenMarks()
        self._absent: LastSeen[str] = LastSeen()
        self._asking: dict[str, trio.Event] = {}
        self._quiet_until = 0.0

    async def find(self, parent: int, name: bytes) -> None:
        """Look a name up that is not known here, and enter the answer."""
        asked = self.entries.key_of_name(parent, name)
        if asked is None:
            return
        key, folder = asked
        if not self.may_ask():
            self.entries.leaving.unseen(key)
            return
        if self._absent.age(key) < VALID:
            self.counters["absent_cached"] += 1
            return
        if (running := self._asking.get(key)) is not None:
            await running.wait()
            return
        ended = self._asking[key] = trio.Event()
        try:
            await self._ask(parent, name, key, folder)
        except IndexDownError as error:
            self.entries.leaving.unseen(key)
            self.failed(error)
        except CatalogError as error:
            log.error("the pool's entry of %s is not entered: %s", key, error)
        finally:
            del self._asking[key]
            ended.set()

    async def _ask(self, parent: int, name: bytes, key: str, folder: str) -> None:
        self.counters["lookups"] += 1
        top = escape(name) if parent == ROOT_INO and folder else ""
        entry, listed, switch = await self.index.look(key, folder, top)
        self.note_gone(key, entry)
        if isinstance(entry, PoolEntry) and self.marks.brings_back(key, entry):
            self._absent.note(key)
            return
        if switch.version > 1:
            folder = self.entries.top_folder(name, switch.version)
            (listed,) = await self.index.have_names([folder], patience=PATIENCE)
        there = isinstance(entry, PoolEntry) and await self.peers.usable(entry)
        if isinstance(entry, PoolEntry) and (dead := self.peers.dead(entry)):
            start_task("dead owners of an object", partial(self._forget_owners, key, dead))
        if isinstance(entry, PoolEntry) and not there:
            self.entries.leaving.unseen(key)
        if isinstance(entry, PoolEntry) and there:
            self.remember(key, entry)
            self.counters["found"] += self.entries.enter(parent, name, key, entry)
        elif not (listed and self.entries.make_directory(parent, name, switch)):
            self._absent.note(key)

    async def _forget_owners(self, key: str, dead: Sequence[Owner]) -> None:
        """Take dead owners out of the index, and the object's name out of its listing."""
        try:
            gone = await self.index.forget_owners(key, dead)
            if gone and (listed := self.entries.folder_of(key)) is not None:
                await self.index.unlist_names([listed])
        except IndexDownError as error:
            log.debug("dead owners of %s stay in the index: %s", key, error)

    async def sizes(self, keys: Sequence[str]) -> list[int]:
        """The sizes of the first of these objects, up to one that no live node has."""
        found: list[int] = []
        try:
            for start in range(0, len(keys), AT_ONCE):
                if not self.may_ask():
                    return found
                some = keys[start : start + AT_ONCE]
                nodes = self.few_nodes()
                if nodes is not None:
                    nodes = [self.peers.me().node, *nodes]
                held = await self.index.held(some, nodes)
                lives = {life for one in held if one is not None for life in one.owners}
                serving = await self.peers.that_serve(lives)
                for one in held:
                    if one is None or serving.isdisjoint(one.owners):
                        return found
                    found.append(one.size)
        except IndexDownError as error:
            self.failed(error)
        return found

    def may_ask(self) -> bool:
        """Whether the index may be asked now."""
        return trio.current_time() >= self._quiet_until

    async def entry(self, key: str) -> PoolEntry | None:
        """The entry of an object that was found before. Raises IndexDownError."""
        if (known := self.found.get(key)) is not None:
            return known
        (entry,) = await self.index.find([key])
        if isinstance(entry, GoneEntry) or entry is None:
            return None
        self.remember(key, entry)
        return entry

    def remember(self, key: str, entry: PoolEntry) -> None:
        """Remember an answer, for the fetch that may follow."""
        self.found[key] = entry
        self.found.move_to_end(key)
        if len(self.found) > REMEMBERED:
            self.found.popitem(last=False)

    def note_gone(self, key: str, entry: PoolEntry | GoneEntry | None) -> None:
        """Remember that an object was unlinked or replaced: the bucket may have it yet."""
        self.marks.note(key, entry)
        if not isinstance(entry, GoneEntry):
            self._gone.pop(key, None)
            return
        self._gone[key] = entry
        self._gone.move_to_end(key)
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def has_left(self, parent: int, name: bytes, facts: Facts) -> bool:
        """Whether an object of the bucket was unlinked or replaced, as far as is known."""
        asked = self.entries.key_of_name(parent, name)
        if asked is None:
            return False
        gone = self._gone.get(asked[0])
        if gone is not None and gone.covers(facts.digest, facts.mtime_ns):
            return True
        return self.entries.leaving.hides(asked[0], facts)

    def is_there(self, key: str) -> None:
        """Note that a name is not absent: this node has announced it."""
        self._absent.forget(key)

    def forget_answer(self, key: str) -> bool:
        """Forget the last answer about an object, and return whether there was one."""
        return self.found.pop(key, None) is not None

    def forget(self, key: str) -> None:
        """Treat an object as absent for a moment: no node gives it."""
        self.found.pop(key, None)
        self._absent.note(key)

    def failed(self, error: IndexDownError) -> None:
        """Note that the index did not answer: it counts as empty for a moment."""
        self.counters["failures"] += 1
        if self.index.servers.tried:  # else the daemon has just begun, and connects
            self._quiet_until = trio.current_time() + QUIET
        log.info("names are not looked up in the pool for a moment: %s", error)
