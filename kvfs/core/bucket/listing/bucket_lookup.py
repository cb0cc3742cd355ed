"""Lookups in the bucket: names that are unknown here, and objects that only the bucket has.

Contract: `find` and `confirm` ask the bucket where that is useful. They return within WAIT, with or
without an answer; a late answer is entered for the next caller. They raise nothing. If the bucket
is down, throttled or slow, everything stays as it is known here, and an unknown name is a miss.
Then kvfs asks nothing for a moment. For an object in conflict, the question is whether its name is
free. There is one question about a key at a time, for all callers. Questions that come together go
together. kvfs remembers for a second that a name is nowhere. If a thread is expected to open the
object, `confirm` leaves the question to the open (`open_predictor`). Not for the meaning of an
answer (`remote_entries`), nor for listings (`bucket_listing`).
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.listing.open_predictor import OpenPredictor
from kvfs.core.bucket.listing.remote_directories import EntryName
from kvfs.core.bucket.listing.remote_entries import RemoteEntries, is_stub
from kvfs.core.shared_work import SharedWork, WorkByKey, start_task
from kvfs.errors import CatalogError, TierError
from kvfs.movement import looking
from kvfs.movement.looking import LookupAnswer, LookupQuestion
from kvfs.movement.remote import LOOKS, Remote
from kvfs.s3.errors import StoreError

log = logging.getLogger(__name__)

K = TypeVar("K")

WAIT = 1.0  # s that an operation waits: the kernel locks its directory meanwhile
FIRST_WAIT = 5.0  # s for the first questions: the workers start, which takes 1 s on a busy machine
VALID = 1.0  # s that an answer is trusted, for an object without a local copy
QUIET = 3.0  # s without questions after one without an answer
AT_ONCE = 64  # questions in one call; each takes some 1 ms of the worker
BEHIND = 16  # questions in the background
REMEMBERED = 1 << 16  # names that are nowhere, confirmed objects; some 10 MiB each
FEW, MANY = 1, 1000  # keys to list below a directory: one, or enough to see if all are about to go


class LastSeen(Generic[K]):
    """The times of the last notes of up to REMEMBERED things."""

    def __init__(self) -> None:
        self._times: OrderedDict[K, float] = OrderedDict()

    def note(self, what: K) -> None:
        self._times[what] = trio.current_time()
        self._times.move_to_end(what)
        if len(self._times) > REMEMBERED:
            self._times.popitem(last=False)

    def age(self, what: K) -> float:
        return trio.current_time() - self._times.get(what, float("-inf"))

    def forget(self, what: K) -> None:
        self._times.pop(what, None)


class _Look(SharedWork):
    """A question under way: about a name that is not known, or an inode that is."""

    def __init__(self, ask: LookupQuestion, place: EntryName | None, ino: int) -> None:
        super().__init__()
        self.ask = ask
        self.place = place
        self.ino = ino


class BucketLookup:
    """Looks up names and objects in one bucket."""

    def __init__(self, remote_entries: RemoteEntries, remote: Remote) -> None:
        self.remote_entries = remote_entries
        self.remote = remote
        self.bucket = remote.bucket
        self.ledger = remote_entries.ledger
        self.dirty = remote_entries.dirty
        self._looks: WorkByKey[str, _Look] = WorkByKey(
            lambda key, error: log.error(
                "the lookup of %s in the bucket: a defect of kvfs", key, exc_info=error
            )
        )
        self._waiting: deque[_Look] = deque()
        self._calls = 0
        self._quiet_until = 0.0
        self._wait = FIRST_WAIT
        self._absent: LastSeen[str] = LastSeen()
        self.confirmed: LastSeen[int] = LastSeen()
        self.open_predictor = OpenPredictor(self._not_opened)

    # Questions of operations

    async def find(self, parent: int, name: bytes) -> None:
        """Look a name up that is not known here, and enter the answer."""
        if not self.bucket.shared or not self.may_ask():
            return
        place = EntryName(parent, name)
        with trio.move_on_after(self._wait) as waited:
            while not self.dirty.loaded:
                await self.dirty.changed.wait()
            ask = self.remote_entries.ask(place)
            if ask is None:
                return
            if self._absent.age(ask.key) < VALID:
                self.bucket.counters["absent_cached"] += 1
                return
            await self._look(ask, place=place).ended.wait()
        self._waited(waited)

    def doubts(self, inode: Inode) -> bool:
        """Whether `confirm` has to ask the bucket about the object."""
        if not inode.in_bucket and inode.ino not in self.dirty.contested:
            return False
        if is_stub(inode):
            return True
        return self.bucket.shared and self.confirmed.age(inode.ino) >= self._believed(inode)

    async def confirm(self, inode: Inode, thread: int = 0) -> None:
        """Ask the bucket whether it still has an object; in the background if there is a copy here.

        thread: the one that looks the object up.
        """
        if self._is_here(inode):
            self._confirm_behind(inode.ino)
            return
        if thread and not is_stub(inode) and self.open_predictor.expected(thread, inode.ino):
            return
        stored = self.dirty.stored(inode.ino)
        if stored is None or not self.may_ask():
            return
        look = self._look(LookupQuestion(stored.key, sure=True), ino=inode.ino)
        with trio.move_on_after(self._wait) as waited:
            await look.ended.wait()
        self._waited(waited)

    def _confirm_behind(self, ino: int) -> None:
        key = self._key(ino)
        if key is None or not self.may_ask() or len(self._looks) >= BEHIND:
            return  # at another time
        self._look(LookupQuestion(key, sure=True), ino=ino)
        self.confirmed.note(ino)  # the question is under way

    def _key(self, ino: int) -> str | None:
        """The key of an object in the bucket. In conflict: the key that another node has."""
        if ino in self.dirty.contested and (inode := self.ledger.table.inode(ino)) is not None:
            return self.dirty.key(inode)
        stored = self.dirty.stored(ino)
        return None if stored is None else stored.key

    def _not_opened(self, ino: int) -> None:
        """Ask about an object that was looked up and not opened. No caller waits for it."""
        try:
            self._confirm_behind(ino)
        except CatalogError as error:
            named = self.ledger.catalog.named(ino)
            log.error("%s is not compared with the bucket: %s", named, error)

    def matched(self, ino: int) -> None:
        """Note that the bucket has this version of the object: its bytes have come."""
        self.confirmed.note(ino)

    async def ask_of(self, inodes: Sequence[int]) -> None:
        """Ask the bucket whether it still has these objects, without a limit of time."""
        for start in range(0, len(inodes), AT_ONCE):
            looks = []
            for ino in inodes[start : start + AT_ONCE]:
                if not self.may_ask():
                    return
                if (key := self._key(ino)) is not None:
                    looks.append(self._look(LookupQuestion(key, sure=True), ino=ino))
            for look in looks:
                await look.ended.wait()

    async def fetch_metadata(self, ino: int) -> Inode | None:
        """Fetch the metadata of a stub. Returns the inode, or None if that is impossible now."""
        inode = self.ledger.table.inode(ino)
        if inode is not None and is_stub(inode):
            await self.confirm(inode)
            inode = self.ledger.table.inode(ino)
        return None if inode is None or is_stub(inode) else inode

    def ttl_remaining(self, inode: Inode, most: float, *, listed: bool = False) -> float:
        """The seconds that the kernel may keep the facts of an inode, at most `most`.

        listed: no program has looked the name up, so the time counts from the last answer.
        """
        if is_stub(inode):
            return 0.0
        if not self.bucket.shared or not inode.is_file:
            return most
        if not self.ledger.namespaces.of(inode).takes(self.bucket):
            return most
        believed = self._believed(inode)
        if listed and inode.in_bucket:
            believed = max(0.0, believed - self.confirmed.age(inode.ino))
        return min(most, believed)

    def _is_here(self, inode: Inode) -> bool:
        return bool(self.ledger.tiers.holders(inode) or self.ledger.table.peek(inode.ino))

    def _believed(self, inode: Inode) -> float:
        return self.bucket.recheck if not inode.in_bucket or self._is_here(inode) else VALID

    def may_ask(self) -> bool:
        """Whether kvfs may ask the bucket now."""
        if self.bucket.terms is None or self.bucket.health.down:
            return False
        return trio.current_time() >= self._quiet_until

    def _waited(self, waited: trio.CancelScope) -> None:
        if waited.cancelled_caught:
            log.info("%s: no answer in %.0f s, a name is a miss", self.bucket.place, self._wait)
            self._wait = WAIT
            self._quiet_until = trio.current_time() + QUIET

    # Asking

    async def warm_up(self) -> None:
        """Start the workers before an operation waits for them."""
        if self.bucket.shared and self.may_ask():
            try:
                await self.remote.call(
                    "look", 0, (), looking.look, [LookupQuestion(self.bucket.keys.own)]
                )
                self._wait = WAIT
            except (StoreError, TierError) as error:
                log.debug("%s: nothing is looked up yet: %s", self.bucket.place, error)

    def _look(self, ask: LookupQuestion, place: EntryName | None = None, ino: int = 0) -> _Look:
        look = self._looks.get(ask.key)
        if look is None:
            look = self._looks.enter(ask.key, _Look(ask, place, ino))
            self.bucket.counters["lookups"] += 1
            self._send(look)
        return look

    def _send(self, look: _Look) -> None:
        self._waiting.append(look)
        if self._calls < LOOKS:
            self._calls += 1
            start_task("a look-up", self._work)

    async def _work(self) -> None:
        try:
            while self._waiting:
                count = min(AT_ONCE, len(self._waiting))
                await self._ask([self._waiting.popleft() for _ in range(count)])
        finally:
            self._calls -= 1

    async def _ask(self, looks: list[_Look]) -> None:
        answers: list[LookupAnswer | StoreError] = []
        with self.dirty.superseded.watching() as gone:
            try:
                asks = [look.ask for look in looks]
                answers = await self.remote.call("look", 0, (), looking.look, asks)
            except (StoreError, TierError) as error:
                self.failed(error)
            except Exception:
                log.exception("%d names are not looked up: a defect of kvfs", len(looks))
            else:
                self._wait = WAIT
                errors = [one for one in answers if isinstance(one, StoreError)]
                if errors:
                    self.failed(errors[0])
        again = []
        for look, answer in zip(looks, answers, strict=False):  # none, if none could be asked
            if not isinstance(answer, StoreError) and self._enter(look, answer, gone):
                again.append(look)
        for look in looks:
            if look not in again:
                self._looks.end(look.ask.key)
        for look in again:
            self._send(look)

    def _enter(self, look: _Look, answer: LookupAnswer, gone: set[str]) -> bool:
        """Enter an answer. True if it needs another question, for more keys below the name."""
        try:
            if look.place is not None:
                verdict = self.remote_entries.enter_answer(look.place, look.ask, answer, gone)
            else:
                verdict = self.remote_entries.renew(look.ino, look.ask, answer, gone)
        except CatalogError as error:
            log.error("the bucket's names for %s are not entered: %s", look.ask.key, error)
            return False
        except Exception as error:  # noqa: BLE001 (it is logged)
            self._looks.defect(look.ask.key, error)
            return False
        if verdict == "hidden" and look.ask.limit == FEW:
            look.ask = look.ask._replace(limit=MANY)
            return True
        if look.place is not None and verdict == "absent":
            self._absent.note(look.ask.key)
        entry = None if look.place is None else self.ledger.catalog.lookup(*look.place)
        ino = look.ino if entry is None else entry.ino
        if ino and verdict == "here":
            self.confirmed.note(ino)
        elif look.ino:
            self.confirmed.forget(look.ino)
        return False

    def failed(self, error: Exception) -> None:
        """Note a failure of the store: kvfs asks nothing for the next moment."""
        self.bucket.failed("look-up", error)
        log.info("%s: names are not looked up for a moment: %s", self.bucket.place, error)
        self._quiet_until = trio.current_time() + QUIET
