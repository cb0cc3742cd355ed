"""The movers' work: what to demote, promote and settle, when; and emptying the trash.

Contract: nothing here is waited for by an operation. A job works
on one version of a sealed object; when its bytes are there, `_fit` looks whether the object is
still that version and nobody writes it, and otherwise throws the bytes away. A job that fails
leaves everything as it was and says so once. At most one job an object (`_jobs`).
Not for choosing victims, nor for copying.
"""

import errno
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain

import trio

from kvfs import failpoints
from kvfs.catalog import Inode
from kvfs.core.census import Census
from kvfs.core.check import Background
from kvfs.core.namespaces import Namespace
from kvfs.core.order import key_of
from kvfs.core.residency import Residency, Trash
from kvfs.core.room import Room
from kvfs.core.watch import Watch
from kvfs.errors import CatalogError, KvfsError
from kvfs.fairness.admission import Admission
from kvfs.fairness.fair_queue import FairQueue
from kvfs.movement.movers import (
    LostError,
    Moved,
    MoverFailedError,
    MoverOverdueError,
    Movers,
    SourceChangedError,
)
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

Work = Callable[[list[Inode]], Awaitable[None]]

QUEUE_MAX = 65536  # promotions and settlements that wait; more are forgotten, they are optional
OPENS_REMEMBERED = 65536
BATCH_OBJECTS, BATCH_BYTES = 128, 16 << 20  # of small objects that are demoted and synced together
FEW = 1000  # objects that can be looked at one by one in a step of the loop
PAUSE = 1.0  # s without demotions after one failed
DRAIN_PATIENCE = 5.0  # s that a write-back goes on after it was last asked for
GIVE_UP = 8  # failures in a row that end a write-back


class Flow:
    """Run `run()` in a nursery as long as the mount lives; `drain()` before it ends."""

    def __init__(
        self,
        residency: Residency,
        room: Room,
        movers: Movers,
        *,
        promote_after: int,
        reclaimable: int,
    ) -> None:
        self.residency = residency
        self.room = room
        self.movers = movers
        self.promote_after = promote_after
        self.reclaimable = reclaimable  # percent of RAM
        self._jobs: set[int] = set()
        self._wanted: OrderedDict[tuple[str, int], None] = OrderedDict()  # promote or settle, inode
        self._opens: OrderedDict[int, int] = OrderedDict()
        self._slots = 2 * movers.workers
        self._drain_until = 0.0  # everything that only RAM holds is demoted until then
        self._said = ""  # the last failure that was logged
        self._running = 0
        self._demoting = 0  # bytes on their way to NVMe
        self._failures = 0  # in a row
        self._pause = 0.0  # no demotion before this time
        self.admission = Admission(0)
        self._fair = FairQueue(movers.workers)
        self._in_flight: Counter[int] = Counter()  # jobs by namespace
        self._undeleted: list[Trash] = []  # thrown away, but the disk failed
        self.census = Census(residency, self._jobs)
        self.watch = Watch(residency, room)
        self.checks = Background(residency, movers, self._jobs)

    @property
    def jobs(self) -> int:
        return len(self._jobs) + len(self._wanted)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            watch = self.watch
            watches = (watch.growth, watch.space, watch.quotas, watch.heat, watch.health)
            for task in (self.census.run, *watches, self.checks.run):
                nursery.start_soon(self.keep_up, task)
            nursery.start_soon(self.keep_up, partial(self._dispatch, nursery))

    @staticmethod
    async def keep_up(task: Callable[[], Awaitable[None]]) -> None:
        """A disk that fails must not end the mount: say so, and go on after a while."""
        while True:
            try:
                return await task()
            except (KvfsError, OSError) as error:
                log.error("background work goes on in %.0f s after: %s", PAUSE, error)
                await trio.sleep(PAUSE)

    # What others ask for

    def opened(self, inode: Inode) -> None:
        """An object was opened for reading: promote it when it is read again and again."""
        residency = self.residency
        if (
            not self.promote_after
            or residency.ram is None
            or inode.ram_epoch == residency.ram.epoch
        ):
            return
        if not residency.namespaces.of(inode).takes(residency.ram):
            return
        count = self._opens.pop(inode.ino, 0) + 1
        if count < self.promote_after:
            self._opens[inode.ino] = count
            if len(self._opens) > OPENS_REMEMBERED:
                self._opens.popitem(last=False)
        else:
            self._want(inode.ino, "promote")

    def settle(self, inode: Inode) -> None:
        """An object was written directly to NVMe: hash and sync it.

        Not a file that is mostly holes: a capacity file of 100 GB would be read for a minute, and
        is no use to anyone after a crash.
        """
        if inode.blocks * 512 >= inode.size // 2:
            self._want(inode.ino, "settle")

    def _want(self, ino: int, what: str) -> None:
        if len(self._wanted) < QUEUE_MAX:
            self._wanted[what, ino] = None
            self.residency.wake()

    async def matches(self, tier: Tier, inode: Inode) -> bool:
        """Whether a backing file has the digest of its inode.

        Raises TierError if that cannot be known: a disk that fails is no reason to lose a file.
        """
        path = tier.path(inode.ino, inode.version)
        try:
            found = await self.movers.read_through(path, inode.size, sync=False)
        except (FileNotFoundError, SourceChangedError) as error:
            log.error("%s cannot be verified: %s", path, error)
            return False
        except OSError as error:
            raise tier.failed("verify", inode.ino, error) from error
        return found.digest == inode.digest

    # Jobs

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        residency = self.residency
        while True:
            residency.work = trio.Event()
            await self.empty_trash()
            if residency.census_done.is_set():
                for tier in residency.tiers:
                    if tier.free < 0:  # a file has become larger than anyone expected
                        self.room.make_room(tier)
                while self._running < self._slots and (job := self._next_job()):
                    work, inos = job
                    self._jobs.update(inos)
                    self._running += 1
                    nursery.start_soon(self._job, work, inos)
            if not residency.trash or self._paused:
                await residency.work.wait()

    @property
    def _paused(self) -> bool:
        """While NVMe is down nothing is moved or unlinked: all of that needs it."""
        return self.residency.nvme is not None and self.residency.nvme.health.down

    def _next_job(self) -> tuple[Work, list[int]] | None:
        if self._paused:
            return None
        if inos := self._to_demote():
            return self._demote, inos
        for what, ino in self._wanted:
            if ino not in self._jobs:
                del self._wanted[what, ino]
                return self._promote if what == "promote" else self._settle, [ino]
        return None

    def _to_demote(self) -> list[int]:
        """What is to be copied to NVMe next: what goes first of who has most, or at once."""
        if self.residency.ram is None or trio.current_time() < self._pause:
            return []
        spaces = self.room.by_urgency(self._demotable)
        # Who has fewest jobs waiting for its weight comes first: then the movers can be shared.
        spaces.sort(key=lambda space: self._in_flight[space.ino] / space.settings.weight)
        if not self._behind():
            spaces = [space for space in spaces if space.settings.write == "through"]
        return next(filter(None, map(self._oldest_in_ram, spaces)), [])

    @property
    def _demotable(self) -> list[Namespace]:
        """Those whose objects may be on NVMe."""
        nvme = self.residency.nvme
        return [space for space in self.residency.namespaces if nvme and space.takes(nvme)]

    def _oldest_in_ram(self, space: Namespace) -> list[int]:
        """One object, or many small ones that are synced together."""
        inos: list[int] = []
        size = 0
        spare = space.ram_spare if self.draining else ()
        for ino in chain(space.ram_only, space.ram_kept, spare):
            if ino in self._jobs or self._written(ino):
                continue
            inode = self.residency.inode(ino)
            size += 0 if inode is None else inode.blocks * 512
            if inos and size > BATCH_BYTES:
                break
            inos.append(ino)
            if len(inos) == BATCH_OBJECTS:
                break
        return inos

    @property
    def draining(self) -> bool:
        """Whether somebody asks for RAM to be written back, and has done so lately."""
        return trio.current_time() < self._drain_until

    def _behind(self) -> bool:
        """Whether more of RAM must be on NVMe than is, or is on its way there."""
        residency = self.residency
        if residency.ram is None or residency.nvme is None:
            return False
        wanted = residency.ram.capacity * self.reclaimable // 100
        return self.draining or self.room.reclaimable + self._demoting < wanted

    async def _job(self, work: Work, inos: list[int]) -> None:
        about: list[tuple[int, int]] = []
        try:
            found = [inode for ino in inos if (inode := self._fit(ino))]
            about = [(inode.ino, inode.version) for inode in found]
            if found:
                await work(found)
        except (OSError, SourceChangedError, KvfsError) as error:
            if self._concerns(about):
                self._failed(work.__name__, inos, error)
        finally:
            self._running -= 1
            self._jobs.difference_update(inos)
            self.residency.wake()

    def _concerns(self, about: list[tuple[int, int]]) -> bool:
        """Whether a job's failure matters: not if all its objects have changed meanwhile."""
        try:
            return not about or any(self._fit(ino, version) for ino, version in about)
        except KvfsError:
            return True  # the catalog itself is in trouble

    def _failed(self, what: str, inos: list[int], error: Exception) -> None:
        self.residency.counters["job_failures"] += 1
        self._pause = trio.current_time() + PAUSE
        self._failures += 1
        self._tell_health(what, error)
        kind = f"{what}: {type(error).__name__} {getattr(error, 'errno', '')}"
        self._say(f"{what} of inode {inos[0]} failed, nothing is changed: {error}", kind)

    def _tell_health(self, what: str, error: Exception) -> None:
        """Movers read and write NVMe, whatever they do; RAM has no errors but to be full."""
        nvme = self.residency.nvme
        code = error.errno if isinstance(error, OSError) else None
        if nvme is None or code in {errno.ENOSPC, errno.EDQUOT, errno.ENOENT}:
            return
        if code is not None or isinstance(error, MoverOverdueError):
            kind = "no answer" if code is None else errno.errorcode.get(code, str(code))
            nvme.health.failed(time.monotonic(), f"{what.strip('_')}: {kind}")

    def _say(self, message: str, kind: str | None = None) -> None:
        """Log a failure, and those of its kind that follow only for those who look closely."""
        kind = kind or message
        log.log(logging.DEBUG if kind == self._said else logging.WARNING, "%s", message)
        self._said = kind

    def _written(self, ino: int) -> bool:
        """Whether a copy would be in vain: it is being written, or goes when it is closed."""
        held = self.residency.open.get(ino)
        return held is not None and (held.writers > 0 or not held.inode.links)

    def _fit(self, ino: int, version: int | None = None) -> Inode | None:
        """The object, if it is sealed, and still the version that a job was about."""
        current = self.residency.inode(ino)
        if current is None or not current.links or not current.sealed or self._written(ino):
            return None
        return current if version in {None, current.version} else None

    async def _demote(self, inodes: list[Inode]) -> None:
        ram, nvme = self.residency.ram, self.residency.nvme
        if ram is None or nvme is None:
            return
        inodes = [inode for inode in inodes if self._admitted(inode)]
        if not inodes:
            return
        total, taken = 0, 0
        for inode in inodes:
            cost = nvme.cost(inode.blocks)
            if not self.room.reserve(nvme, cost, "lose" if self.draining else "spare"):
                break
            total, taken = total + cost, taken + 1
        if not taken:  # NVMe is full of what RAM holds as well, or too small
            self._pause = trio.current_time() + PAUSE
            self._failures += self.draining
            self._say(f"nothing is demoted: the NVMe tier has no room for {cost} bytes")
            return
        self._demoting += total
        try:
            await self._copy(inodes[:taken], ram, nvme, "demoted")
        finally:
            nvme.reserved -= total
            self._demoting -= total

    def _admitted(self, inode: Inode) -> bool:
        """Whether it is worth its write to NVMe; what is not is lost when RAM is needed."""
        space = self.residency.namespaces.of(inode)
        settings = space.settings
        obliged = inode.kept or settings.pin or settings.eviction == "never"
        if self.admission.decide(
            key_of(inode),
            Tier.cost(inode.blocks),
            time.time(),
            touched=inode.atime_ns > inode.mtime_ns,
            obliged=obliged or self.draining,
        ):
            return True
        space.refuse(inode)
        return False

    async def _promote(self, inodes: list[Inode]) -> None:
        residency, ram, nvme = self.residency, self.residency.ram, self.residency.nvme
        (inode,) = inodes
        if ram is None or nvme is None or residency.holders(inode) != [nvme]:
            return
        cost = ram.cost(inode.blocks)
        if not self.room.reserve(ram, cost):
            residency.counters["promotions_skipped"] += 1
            return
        try:
            await self._copy(inodes, nvme, ram, "promoted")
        finally:
            ram.reserved -= cost

    async def _copy(self, inodes: list[Inode], source: Tier, target: Tier, counter: str) -> None:
        """Copy sealed objects and enter the copies of those that did not change meanwhile."""
        jobs = [(inode.ino, inode.version, inode.digest, inode.size) for inode in inodes]
        paths = [
            (source.path(ino, version), target.path(ino, version), size)
            for ino, version, _, size in jobs
        ]
        results: list[Moved | OSError | SourceChangedError]
        space = self.residency.namespaces.of(inodes[0])
        settings = space.settings
        self._in_flight[space.ino] += 1
        try:
            async with self._fair.turn(
                space.ino,
                sum(size for _, _, size in paths),
                weight=settings.weight,
                bulk=settings.priority == "bulk",
            ):
                if len(paths) == 1:
                    results = [await self.movers.copy(*paths[0], sync=target.slow, cold=True)]
                else:
                    results = await self.movers.copy_all(paths)
        except (MoverFailedError, MoverOverdueError):
            for ino, version, _, _ in jobs:  # the last act of a mover may have been its rename
                self.residency.throw_away(target, ino, version)
            raise
        finally:
            self._in_flight[space.ino] -= 1
        for (ino, version, digest, _), moved in zip(jobs, results, strict=True):
            current = self._fit(ino, version)
            if isinstance(moved, Exception):
                if current is not None:
                    self._failed("copy", [ino], moved)
            elif current is not None and digest in {b"", moved.digest}:
                try:
                    self._enter(current, target, moved)
                except CatalogError as error:
                    self.residency.throw_away(target, ino, version)
                    self._failed("copy", [ino], error)
                else:
                    self.residency.counters[counter] += 1
                    self._failures, self._said = 0, ""
            else:
                self.residency.throw_away(target, ino, version)
                if current is not None:
                    self._rotten(current, source)

    def _enter(self, inode: Inode, target: Tier, moved: Moved) -> None:
        """A copy is there: say so. Raises CatalogError."""
        if failpoints.active:
            failpoints.reach("flow.copied")
        self.residency.add_copy(inode, target, moved.blocks, moved.digest)

    def _rotten(self, inode: Inode, tier: Tier) -> None:
        """A copy that looked untouched has other bytes than it was sealed with."""
        where = tier.path(inode.ino, inode.version)
        self.residency.counters["quarantined"] += 1
        log.error(
            "%s tier: %s is quarantined: its bytes do not match their digest", tier.name, where
        )
        if inode.ino not in self.residency.open and inode.ino not in self.residency.busy:
            self.residency.lose(inode, tier, quarantine=True)

    async def _settle(self, inodes: list[Inode]) -> None:
        (inode,) = inodes
        ino, version, nvme = inode.ino, inode.version, self.residency.nvme
        if nvme is None or not inode.on_nvme:
            return
        try:
            found = await self.movers.read_through(nvme.path(ino, version), inode.size, sync=True)
        except FileNotFoundError:
            current = self._fit(ino, version)
            if current is None or not current.on_nvme:
                return  # RAM has it, and its room on NVMe was needed
            raise
        except LostError:
            await self.lose(ino, version)
            raise
        current = self._fit(ino, version)
        if current is not None:
            if failpoints.active:
                failpoints.reach("flow.settled")
            current.digest = found.digest
            with self.residency.catalog.batch() as batch:
                batch.put(current)
            self.residency.counters["settled"] += 1

    async def lose(self, ino: int, version: int) -> None:
        """The kernel could not write it, and says so once: its page cache is not to be trusted.

        Who has it open has what the page cache has; nobody opens it after that.
        """
        residency, nvme = self.residency, self.residency.nvme
        held = residency.open.get(ino)
        if held is not None:  # if it is being written, the file gets its next version's name
            residency.late.append(partial(self.lose, ino, held.inode.version))
        elif ino in residency.busy:
            residency.late.append(partial(self.lose, ino, version))
        elif nvme is not None and (current := self._fit(ino, version)) and current.on_nvme:
            residency.lose(current, nvme)

    # Writing back

    def write_back(self) -> tuple[int, int]:
        """Start copying everything that only RAM holds. (bytes, objects) still to be copied."""
        residency = self.residency
        ram = residency.ram
        if ram is None or residency.nvme is None:
            return 0, 0
        spaces = self._demotable
        size = sum(space.held[ram.name] - space.clean_bytes for space in spaces)
        count = sum(space.held_objects[ram.name] - space.clean_objects for space in spaces)
        if count <= FEW:  # look closely: what is open without a name is not worth copying
            orders = ((space.ram_only, space.ram_kept, space.ram_spare) for space in spaces)
            inos = chain.from_iterable(chain.from_iterable(orders))
            inodes = [residency.inode(ino) for ino in inos if not self._written(ino)]
            size, count = sum(ram.cost(inode.blocks) for inode in inodes if inode), len(inodes)
        if count:
            self._drain_until = trio.current_time() + DRAIN_PATIENCE
            residency.wake()
        return size, count

    async def drain(self) -> None:
        """Write back until all is on NVMe, or NVMe takes no more."""
        self._failures = 0
        counted = self.residency.census_done.is_set
        while (left := self.write_back())[1] or not counted():
            if self._failures >= GIVE_UP or self._paused:
                log.error("%d objects (%d bytes) could not be written back", left[1], left[0])
                break
            await trio.sleep(0.02)
        self._drain_until = 0.0

    # Files that nobody wants any more

    @property
    def trash(self) -> int:
        """Backing files that are to be removed."""
        return len(self.residency.trash) + len(self._undeleted)

    async def empty_trash(self) -> None:
        """Remove what was thrown away. An entry leaves the list when its file is gone.

        Not while NVMe is down. What a failing disk refused is tried once more when it is healthy;
        after that it is the next mount's sweep that finds it.
        """
        trash, nvme = self.residency.trash, self.residency.nvme
        while trash and nvme is not None and not nvme.health.down:
            batch = trash[:64]
            self._undeleted += await nvme.calls.wait(partial(_empty, batch))
            del trash[: len(batch)]
        if self._undeleted and nvme is not None and nvme.health.state == "healthy":
            again, self._undeleted = self._undeleted, []
            batch = [one for one in again if not self._in_use(one)]
            await nvme.calls.wait(partial(_empty, batch))

    def _in_use(self, trash: Trash) -> bool:
        """Whether a backing file that was thrown away has been made again since."""
        current = self.residency.inode(trash.ino)
        if current is None or current.version != trash.version:
            return False
        return trash.ino in self._jobs or trash.tier in self.residency.holders(current)


def _empty(batch: list[Trash]) -> list[Trash]:
    """Returns what could not be removed."""
    return [trash for trash in batch if not trash.remove()]
