"""The core on real tiers and a real catalog, without a kernel, and what must always hold in it."""

import math
import os
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

import trio
import xxhash

from kvfs import prefix as prefix_paths
from kvfs.catalog import ROOT_INO, Catalog, Inode, PackedCopy, keys
from kvfs.config import Config
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.core.capacity.placement import Placement
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.dispatcher import Dispatcher
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.moves.movement import Movement
from kvfs.core.names.attributes import Attributes
from kvfs.core.names.renames import Renames
from kvfs.core.names.tree import Tree
from kvfs.core.names.walks import Walks
from kvfs.core.namespaces.blocks import Blocks
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.objects import Objects
from kvfs.daemon.storage import begin_session, bind
from kvfs.layouts import prefix
from kvfs.live import LiveConfig
from kvfs.movement import copying, packing
from kvfs.movement.movers import Moved, MoverPool, Repacked, SourceChangedError
from kvfs.movement.remote import Lane, Remote
from kvfs.s3.place import BucketPlace
from kvfs.s3.store import Store
from kvfs.s3.transfer import StoreTransfers, Terms
from kvfs.settings import Settings
from kvfs.tiers import Bucket, NvmeTier, RamTier, Tier, calls
from tests.unit.fast_gate import TableGate

P = ParamSpec("P")
T = TypeVar("T")
MIB = 1 << 20
# Threads take real time: a clock that jumps would give up calls that are being answered.
calls.DEADLINE = calls.PROBE_DEADLINE = math.inf


async def nothing() -> None:
    """Do nothing: the default event while a mover works."""


class Inline(MoverPool):
    """Movers that copy in this process. Tests can put events `before` and `after` a job.

    Nothing is synced: no test cuts the power.
    """

    def __init__(self) -> None:
        self.workers = 2
        self.counters = Counter[str]()
        self.running = 0
        self.before: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[], Awaitable[None]] = nothing

    async def copy(
        self,
        source: str,
        destination: str,
        size: int,
        *,
        sync: bool,  # noqa: ARG002
        cold: bool,  # noqa: ARG002
        sparse: bool = False,
        data: int | None = None,  # noqa: ARG002
    ) -> Moved:
        await self.before()
        moved = copying.copy(source, destination, size, sync=False, cold=False, sparse=sparse)
        await self.after()
        return moved

    async def copy_all(
        self,
        items: list[tuple[str, str, int, bool]],
        data: Sequence[int],  # noqa: ARG002
    ) -> list[Moved | OSError | SourceChangedError]:
        await self.before()
        moved = copying.copy_all(items)
        await self.after()
        return moved

    async def pack(
        self, source: str, destination: str, size: int, element_size: int | None
    ) -> Repacked:
        await self.before()
        moved = packing.pack(source, destination, size, element_size)
        await self.after()
        return moved

    async def unpack(
        self,
        source: str,
        destination: str,
        packed: PackedCopy,
        size: int,
        digest: bytes,
        *,
        sync: bool,  # noqa: ARG002
    ) -> Repacked:
        await self.before()
        moved = packing.unpack(source, destination, packed, size, digest, sync=False)
        await self.after()
        return moved

    async def unpacked_digest(self, source: str, packed: PackedCopy, size: int) -> bytes:
        await self.before()
        return packing.unpacked_digest(source, packed, size)

    async def read_through(
        self,
        source: str,
        size: int,
        *,
        sync: bool,  # noqa: ARG002
        sparse: bool = False,
        data: int | None = None,  # noqa: ARG002
    ) -> Moved:
        await self.before()
        moved = copying.read_through(source, size, sync=False, sparse=sparse)
        await self.after()
        return moved

    async def run(
        self,
        job: Callable[..., T],
        *arguments: object,
        options: Mapping[str, bool] = {},
        patience: float = 0.0,
        destinations: Sequence[str] = (),
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        del patience, destinations
        async with limiter or nullcontext():
            await self.before()
            done = job(*arguments, **options)
            await self.after()
            return done


class InlineRemote(Remote):
    """Calls the store in this process; `before` and `after` a call something else may happen."""

    def __init__(self, movers: MoverPool, bucket: Bucket, store: Store) -> None:
        super().__init__(movers, bucket)
        self.most_downloads = 4  # few, so that some have to wait
        self.store = store
        self.before: Callable[[], Awaitable[None]] = nothing
        self.after: Callable[[], Awaitable[None]] = nothing

    async def call(
        self,
        lane: Lane,
        size: int,
        destinations: Sequence[str],
        do: Callable[Concatenate[StoreTransfers, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        del lane, size, destinations
        await self.before()
        transfers = StoreTransfers(self.store, self.bucket.terms or Terms())
        try:
            done = do(transfers, *arguments, **options)
        finally:
            transfers.close()
        await self.after()
        return done

    async def ask(self, identity: str) -> None:
        await self.before()
        self.store.list(identity, limit=1)


class Calm(BackingFiles):
    """Waits for the disk in this thread: threads are not what these tests are about."""

    @staticmethod
    async def io(tier: Tier, call: Callable[[], T]) -> T:
        if tier.slow:
            await trio.lowlevel.checkpoint()
        return call()


class Ids:
    """Backings that count what they gave out; `first` 0 means that the daemon serves all bytes."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self.taken: set[int] = set()

    def register(self, fd: int) -> int:
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        if not self._next:
            return 0
        self._next += 1
        self.taken.add(self._next)
        return self._next

    def release(self, backing_id: int) -> None:
        self.taken.remove(backing_id)


class World:
    """A mount without a mount: `restart()` is a new daemon on the same storage."""

    def __init__(
        self,
        tmp: Path,
        *,
        ram: int = 16 * MIB,
        nvme: int = 64 * MIB,
        passthrough: bool = False,
        files: type[BackingFiles] = Calm,
        store: Store | None = None,
    ) -> None:
        """store: there is a bucket, in which that is."""
        self.bucket_store = store
        self.tmp = tmp
        self.sizes = (ram, nvme)
        self.passthrough = passthrough
        self.kind = files
        self.gone: list[tuple[int, bytes, int]] = []
        self.templates: Callable[[str], Settings | None] = lambda _: None
        self.start()
        trio.run(self.census)

    def start(self) -> None:
        ram, nvme = self.sizes
        self.gate: TableGate | None = None
        self.catalog = Catalog(self.tmp / "catalog")
        self.nvme = NvmeTier(self.tmp / "nvme", nvme) if nvme else None
        epoch = int(self.catalog.fact("ram_epoch") or 0)
        where = self.tmp / "ram"
        self.ram = RamTier(where, ram, identity="w", epoch=epoch, huge="never") if ram else None
        self.bucket: Bucket | None = None
        if self.bucket_store is not None:
            place = BucketPlace("memory", "p/")
            self.bucket = Bucket(place, Terms(part=5 * MIB), most=1 << 40, delay=0, wait=30)
            bind(self.catalog, self.bucket)
        self.ledger = begin_session(
            self.catalog,
            self.ram,
            self.nvme,
            bucket=self.bucket,
            takeover=False,
            invalidate_name=self._gone,
        )
        self.gone.clear()  # no kernel knows yet
        self.catalog.watchers.append(self._expect_open_record)
        self.ledger.accounts.estimate()
        self.room = Room(self.ledger)
        self.quota = Quota(self.ledger, self.room.victims)
        self.placement = Placement(self.room, self.quota)
        self.tree = Tree(self.ledger, templates=lambda name: self.templates(name))  # noqa: PLW0108 (a test may change it)
        self.renames, self.attributes = Renames(self.tree), Attributes(self.tree)
        self.walks = Walks(self.tree, self.quota)
        self.movers = Inline()
        self.movers.counters = self.ledger.counters
        self.remote: InlineRemote | None = None
        if self.bucket_store is not None and self.bucket is not None:
            self.remote = InlineRemote(self.movers, self.bucket, self.bucket_store)
        notes = self.tmp / "uploads"
        notes.mkdir(exist_ok=True)
        config = Config(mountpoint=self.tmp, promote_after=2, reclaimable=25, scrub=0)
        self.live = LiveConfig(config, self.tmp / "config")
        self.dispatcher = Dispatcher(
            *(self.ledger, self.room, self.quota, self.movers, self.live),
            remote=self.remote,
            tree=self.tree,
            notes=str(notes),
            identity="w",
        )
        self.lifecycle = Lifecycle(
            self.tree, invalidate_tree=self._gone, warmer=self.dispatcher.warm
        )
        self.swept = False
        self.backings = Ids(1000 if self.passthrough else 0)
        self.files = self.kind(self.ledger.records, self.ledger.counters, self.backings)
        self.objects = Objects(
            self.ledger,
            self.placement,
            self.files,
            self.dispatcher.verification,
            promote=self.dispatcher.opened,
            verify=self.dispatcher.verification.written,
            fetcher=self.dispatcher.hydration,
            unpacker=self.dispatcher.unpacking,
        )

    def _expect_open_record(self, inode: Inode) -> None:
        """Expect that nobody changes a copy of the record of an open object.

        The close of the object writes the record that the object has, and undoes the change.
        """
        held = self.ledger.table.peek(inode.ino)
        assert held is None or held.inode is inode, f"{held} has another record than {inode}"

    def _gone(self, parent: int, name: bytes, ino: int) -> None:
        self.gone.append((parent, name, ino))

    def stop(self) -> None:
        for held in self.ledger.table.open.values():
            if held.fd >= 0:
                os.close(held.fd)
        self.ledger.trash.count()
        for fd in (*(file.fd for file in self.ledger.trash.mapped), *self.ledger.trash.closing):
            os.close(fd)
        self.catalog.close()
        if self.nvme is not None:
            self.nvme.close()
        if self.ram is not None:
            self.ram.close()

    def end(self) -> None:
        self.stop()
        if self.ram is not None:
            self.ram.remove()

    def restart(self, *, lose_ram: bool = False, crash: bool = False, reboot: bool = False) -> None:
        """A new daemon on the same storage; the census is the caller's."""
        with self.catalog.batch() as batch:
            if not crash:
                batch.set_fact("clean", str(self.ledger.session))
            if reboot:
                batch.set_fact("boot", "an earlier one")
        self.stop()
        if (lose_ram or reboot) and self.ram is not None:
            self.ram.remove()
        self.start()

    @property
    def tiers(self) -> list[Tier]:
        return self.ledger.tiers.local

    @property
    def fast(self) -> RamTier:
        assert self.ram is not None
        return self.ram

    @property
    def disk(self) -> NvmeTier:
        assert self.nvme is not None
        return self.nvme

    def answer_fast(self) -> None:
        """Answer opens for reading from a table, as the C part's thread does."""
        self.gate = TableGate(self)
        self.ledger.fast_opens.reopen = self.objects.reopen
        self.ledger.fast_opens.start(self.gate)

    def fast_ids(self) -> set[int]:
        """The backing ids of objects whose opens need no daemon."""
        entries = {} if self.gate is None else self.gate.entries
        waiting = self.ledger.fast_opens.waiting
        return {held.backing_id for held in (*entries.values(), *waiting.values())}

    # Steps of an application

    async def create(self, name: bytes, content: bytes = b"", parent: int = ROOT_INO) -> OpenObject:
        directory, make = self.tree.maker(parent, name, stat.S_IFREG | 0o644, 0, 0)
        held = await self.objects.creation.create(directory, name, make)
        self.write(held, content)
        return held

    @staticmethod
    def write(held: OpenObject, content: bytes, at: int = 0) -> None:
        """As the kernel does it, through passthrough: kvfs sees nothing of it."""
        assert held.writers
        os.pwrite(held.fd, content, at)

    async def close(self, held: OpenObject, *, writable: bool) -> None:
        await self.objects.sealing.close(held, writable=writable)

    async def store(self, name: bytes, content: bytes, tier: Tier | None = None) -> Inode:
        """A whole file, in a certain tier if that matters, in a directory that may have to be."""
        above, _, name = name.rpartition(b"/")
        if above and not self.catalog.lookup(ROOT_INO, above):
            self.mkdir(above)
        parent = self.at(above).ino
        if tier is not None:
            self.expect(name, len(content) if tier is self.ram else None, parent)
        held = await self.create(name, content, parent)
        assert tier is None or held.tier is tier
        await self.close(held, writable=True)
        return held.inode

    def expect(self, name: bytes, size: int | None, parent: int = ROOT_INO) -> None:
        """Let files like this begin in RAM, if a size is known, or on NVMe."""
        self.forget_sizes()
        if size is not None:
            directory = self.ledger.table.inode(parent)
            assert directory is not None
            self.learn(directory, name, size)

    def learn(self, directory: Inode, name: bytes, size: int) -> None:
        """Let kvfs expect this size of new files like this one."""
        space = self.ledger.namespaces.of(directory)
        kind = self.placement.expect(directory, name).kind
        self.placement.sizes.learn(space.ino, kind, size)

    def forget_sizes(self) -> None:
        self.placement.sizes._seen.clear()

    def find(self, name: bytes, parent: int = ROOT_INO) -> Inode:
        return self.tree.lookup(parent, name)

    async def make_file(self, path: bytes, content: bytes) -> Inode:
        """A whole file below directories that are there."""
        *above, name = path.split(b"/")
        parent = self.at(b"/".join(above)).ino
        held = await self.create(name, content, parent)
        await self.close(held, writable=True)
        return held.inode

    def at(self, path: bytes) -> Inode:
        """Return the inode of a path. Raises NotFoundError."""
        found = self.tree.inode(ROOT_INO)
        for name in filter(None, path.split(b"/")):
            found = self.tree.lookup(found.ino, name)
        return found

    def mkdir(self, path: bytes) -> Inode:
        above, _, name = path.rpartition(b"/")
        return self.tree.make(self.at(above).ino, name, stat.S_IFDIR | 0o755, 0, 0)

    def namespace(self, name: str, **settings: str) -> Namespace:
        return self.lifecycle.make(name, settings, uid=0, gid=0)

    def tell(self, name: str, **settings: str) -> Namespace:
        return self.lifecycle.change(self.lifecycle.directory(name), settings)

    def drop(self, name: str) -> None:
        self.lifecycle.drop(self.lifecycle.directory(name))

    async def walk(self) -> None:
        """Until nothing is dropped, or accounted to what it was in before, any more."""
        namespaces = self.ledger.namespaces
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.walks.run)
            while namespaces.dropped or namespaces.unaccounted:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def close_prefixes(self) -> None:
        """Until no block's directory is there without its block any more."""
        going = self.ledger.prefixes.going
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.walks.close_prefixes)
            while going:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def read(self, ino: int) -> bytes:
        held = await self.objects.open(ino, writable=False)
        try:
            return self.content(held)
        finally:
            await self.close(held, writable=False)

    def content(self, held: OpenObject) -> bytes:
        if held.fd >= 0:
            return os.pread(held.fd, 1 << 30, 0)
        return Path(held.tier.path(held.inode.ino, held.inode.version)).read_bytes()

    # Steps of the movers

    async def demote(self, ino: int) -> None:
        await self.job(ino, self.dispatcher.demotion)

    async def promote(self, ino: int) -> None:
        await self.job(ino, self.dispatcher.promotion)

    async def settle(self, ino: int) -> None:
        await self.job(ino, self.dispatcher.verification)

    async def upload(self, ino: int) -> None:
        """As the dispatcher of uploads does it, whether it is due or not."""
        dispatcher = self.dispatcher
        assert dispatcher.uploader is not None
        await dispatcher.trash.empty()
        assert ino in dispatcher.uploader.dirty
        dispatcher.uploader.dirty._due.pop(ino, None)
        dispatcher._jobs.add(ino)
        dispatcher.uploader.running += 1
        await dispatcher.uploader.job(ino)

    async def upload_all(self) -> None:
        """Until nothing is dirty, and nothing is to be deleted."""
        spill = self.dispatcher.uploader
        assert spill is not None
        await spill.dirty.load()
        while len(spill.dirty):
            for ino in list(spill.dirty):
                if ino in spill.dirty:
                    await self.upload(ino)
        while spill.dirty.superseded.deletes:
            await spill.deletion.delete_some()

    async def job(self, ino: int, movement: Movement) -> None:
        """As the dispatcher does it: no job begins before the trash is empty."""
        await self.dispatcher.trash.empty()
        if ino not in self.dispatcher._jobs:
            self.dispatcher._jobs.add(ino)
            self.dispatcher._running += 1
            await self.dispatcher._job(movement, [ino])

    async def census(self) -> None:
        await self.dispatcher.census.run()
        self.swept = True

    # Invariants

    def inodes(self) -> Iterator[Inode]:
        """Every inode there is, as the core sees it."""
        known = {inode.ino for inode in self.catalog.inodes_after(0, 1 << 20)}
        for ino in sorted(known):
            inode = self.ledger.table.inode(ino)
            assert inode is not None
            yield inode
        assert set(self.ledger.table.open) <= known

    def on_disk(self, tier: Tier) -> set[str]:
        return {path for _, _, path in tier.files()}

    def check_accounts(self) -> None:
        """Check the invariants between any two awaits: used bytes, objects, lists."""
        ledger = self.ledger
        if not ledger.accounts.census_done.is_set():
            return  # objects that it has not reached are not in the accounts
        used, objects = Counter[str](), Counter[str]()
        clean = clean_objects = spilled = 0
        only_ram = 0, 0
        stored = [0, 0]
        found: dict[Tier, set[int]] = {tier: set() for tier in self.tiers}
        spaces = {space: [0, 0] for space in self.spaces()}
        blocks = {
            space: Blocks(lambda _: None) for space in self.spaces() if space.blocks is not None
        }
        for inode in self.inodes():
            held = ledger.table.peek(inode.ino)
            if not inode.is_file or inode.ino in ledger.orphans.rooms:
                continue
            if not (inode.sealed if held is None else held.accounted):
                assert held is not None, f"{inode} is neither open nor sealed"
                continue
            holders = ledger.tiers.holders(inode)
            if held is None or not held.coming or inode.links:  # else its key is kept for it
                assert holders or inode.in_bucket, f"{inode} is nowhere"
            if (known := blocks.get(ledger.namespaces.of(inode))) is not None:
                tiers = [tier.name for tier in holders]
                known.count(inode, [*tiers, "s3"] if inode.in_bucket else tiers, 1)
            if inode.in_bucket:
                stored[0] += inode.size
                stored[1] += 1
            if not holders:
                spilled += inode.in_bucket
                continue
            for tier in holders:
                used[tier.name] += ledger.tiers.cost(inode, tier)
                objects[tier.name] += 1
            if len(holders) > 1:
                clean += Tier.cost(inode.blocks)
                clean_objects += 1
            elif holders == [self.ram] and not inode.in_bucket:
                only_ram = only_ram[0] + inode.size, only_ram[1] + 1
            space = ledger.namespaces.of(inode)
            spaces[space][0] += Tier.cost(inode.blocks)
            spaces[space][1] += 1
            for tier in holders:
                found[tier].add(inode.ino)
                assert inode.ino in set(space.order(inode, tier, holders))
            if space.quota_order is not None and space.quota_order_filled and not inode.unevictable:
                assert inode.ino in set(space.quota_order)
        for tier in self.tiers:
            has, wanted = (tier.used, tier.objects), (used[tier.name], objects[tier.name])
            assert has == wanted, f"{tier.name}: {has}, should be {wanted}"
        for space, counted in spaces.items():
            assert [space.bytes, space.objects] == counted, f"namespace {space.ino}"
            copies = sum(count for name, count in space.held_objects.items() if name != "s3")
            assert copies == space.objects + space.doubled_objects, f"namespace {space.ino}"
            assert set(space.refused) == set(space.ram_spare), f"namespace {space.ino}"
        for space, known in blocks.items():
            assert space.blocks is not None
            assert space.blocks._of == known._of, f"namespace {space.ino}"
        assert (ledger.accounts.doubled_bytes, ledger.accounts.doubled_objects) == (
            clean,
            clean_objects,
        )
        assert (ledger.accounts.only_ram_bytes, ledger.accounts.only_ram_objects) == only_ram
        # Those of NVMe may be there in vain, from the past.
        in_ram = [*self.listed("ram_only"), *self.listed("ram_clean"), *self.listed("ram_kept")]
        in_ram += self.listed("ram_spare")
        assert sorted(in_ram) == sorted(found[self.ram] if self.ram else ())
        local = len(set().union(*found.values()))
        assert ledger.accounts.spilled == spilled
        assert ledger.accounts.objects == local + spilled + len(ledger.table.staging)
        if ledger.tiers.bucket.mounted:
            assert [ledger.tiers.bucket.used, ledger.tiers.bucket.objects] == stored
            self.check_dirty()

    def check_dirty(self) -> None:
        """Check that the marks of the bucket agree with the state in memory."""
        dirty = self.ledger.dirty
        if not dirty.loaded:
            return
        marked = {ino for ino, _ in self.catalog.marks(keys.UNSTORED)}
        assert set(dirty) == marked
        contested = {ino for ino, _ in self.catalog.marks(keys.CONTESTED)}
        assert set(dirty.contested) == contested
        assert not contested & marked
        for ino in contested:
            inode = self.ledger.table.inode(ino)
            assert inode is not None
            assert inode.sealed
            assert inode.links
            assert not inode.in_bucket
        deletes: dict[str, set[int]] = {}
        for number, key in self.catalog.marks(keys.DELETED):
            deletes.setdefault(key.decode().partition("\0")[0], set()).add(number)
        assert dirty.superseded.deletes == deletes
        sizes = 0
        for inode in self.inodes():
            known = dirty.stored(inode.ino)
            assert known is not None or not inode.in_bucket, f"{inode} is nowhere in the bucket"
            if inode.ino in marked:
                assert inode.links
                assert inode.sealed
                sizes += 0 if inode.in_bucket else inode.size
        assert dirty.bytes == sizes

    def listed(self, which: str) -> list[int]:
        """Return the inodes in all orders of that name."""
        return [ino for space in self.spaces() for ino in getattr(space, which)]

    def spaces(self) -> list[Namespace]:
        """All, also those that were dropped, and those of which only open files are left."""
        namespaces = self.ledger.namespaces
        left = (*namespaces.dropped.values(), *namespaces._ended.values())
        assert all(space.objects for space in namespaces._ended.values())
        return [*namespaces, *left]

    def check(self) -> None:
        """Check the invariants between any two operations."""
        self.check_accounts()
        ledger = self.ledger
        assert not ledger.table.busy
        reserved = Counter[str]()
        staging, unfinished, either = set(), set(), set()
        for ino, held in ledger.table.open.items():
            assert held.inode.ino == ino
            assert held.readers + held.writers > 0
            assert held.fd >= 0 or not held.writers
            reserved[held.tier.name] += held.reserved
            if held.writers:
                assert not held.accounted
                staging.add(ino)
            writes = held.mapped or (held.writers and not held.inode.sealed)
            if not held.inode.links or writes:
                unfinished.add(ino)
            if held.mapped and held.inode.links and held.writers > 1:
                either.add(ino)  # finished by the flush of another writer, until its release
        for ino, room in ledger.orphans.rooms.items():
            inode = self.catalog.inode(ino)
            assert inode is not None
            assert not inode.links
            if room is None:
                assert not inode.is_file
            else:
                assert ledger.tiers.holders(inode) == [room.tier]
                reserved[room.tier.name] += room.size
            unfinished.add(ino)
        for file in ledger.trash.mapped:
            reserved[file.tier.name] += file.size
        assert not ledger.orphans.rooms.keys() & ledger.table.open.keys()
        assert set(ledger.table.staging) == staging
        written = Counter[Namespace]()
        for held in ledger.table.open.values():
            if held.space is not None:
                written[held.space] += held.staged
        unlinked = Counter[Namespace]()
        for one in (*ledger.orphans.rooms.values(), *ledger.trash.mapped):
            if one is not None:
                unlinked[one.space] += one.size
        for space in self.spaces():
            assert space.staged == written[space]
            assert space.unlinked == unlinked[space]
            assert not space.ahead or written[space]
        if self.dispatcher.hydration is not None:
            headers = sum(held.header is not None for held in ledger.table.open.values())
            assert self.dispatcher.hydration.headers == headers
        for tier in self.tiers:
            found, wanted = tier.reserved, reserved[tier.name]
            assert found == wanted, f"{tier.name}: {found} reserved, should be {wanted}"
        assert set(self.catalog.unfinished()) - either == unfinished - either
        self.check_names()
        self.check_files()
        ids = {held.backing_id for held in ledger.table.open.values()} - {0}
        assert ids | self.fast_ids() == self.backings.taken

    def check_names(self) -> None:
        """Links of inodes and entries of directories say the same."""
        links = {
            (parent, cookie, inode.ino)
            for inode in self.inodes()
            for parent, cookie in inode.links
            if inode.ino != ROOT_INO
        }
        entries = set()
        for directory in self.inodes():
            if not directory.is_dir:
                continue
            subdirs = 0
            for entry in self.catalog.entries_after(directory.ino, 0, 1 << 20):
                assert self.catalog.lookup(directory.ino, entry.name) == entry
                entries.add((directory.ino, entry.cookie, entry.ino))
                inode = self.ledger.table.inode(entry.ino)
                assert inode is not None, f"{entry} leads nowhere"
                subdirs += inode.is_dir
            assert directory.subdirs == subdirs
        assert links == entries
        self.check_prefixes()

    def check_prefixes(self) -> None:
        """A block has its directory; what has lost its block is on its way."""
        prefixes = self.ledger.prefixes
        assert prefixes.going == {ino for ino, _ in self.catalog.marks(keys.GOING)}
        for space in self.ledger.namespaces:
            if not space.settings.prefix:
                continue
            entries = self.catalog.entries_after(space.ino, 0, 1 << 20)
            directories = {entry.name: entry.ino for entry in entries}
            blocks = {
                found.key.hex().encode(): prefix.number(bytes.fromhex(above.decode()))
                for above, ino in directories.items()
                if (inode := self.ledger.table.inode(ino)) is not None and inode.is_dir
                for entry in self.catalog.entries_after(ino, 0, 1 << 20)
                if (found := prefix_paths.parse(os.fsdecode(entry.name))) and not found.temporary
            }
            assert not blocks.keys() - directories, "a block has no directory"
            for name, ino in directories.items():
                inode = self.ledger.table.inode(ino)
                assert inode is not None
                if inode.key and ino not in prefixes.going:
                    number = prefix.number(bytes.fromhex(name.decode()))
                    assert (inode.key, inode.parent_key) == (number, blocks[name])
                else:
                    assert name not in blocks or ino not in prefixes.going

    def check_files(self) -> None:
        """Every backing file is named by the catalog or in the trash, and the other way round."""
        for tier in self.tiers:
            named = {
                tier.path(inode.ino, inode.version)
                for inode in self.inodes()
                if inode.is_file and tier in self.ledger.tiers.holders(inode)
            }
            trash = {
                tier.path(trash.ino, trash.version)
                for trash in self.ledger.trash.files
                if trash.tier is tier
            }
            found = self.on_disk(tier)
            assert not named & trash, f"{tier.name}: {named & trash} would be thrown away"
            assert named <= found, f"{tier.name} lacks {named - found}"
            if not self.swept:
                continue
            assert found <= named | trash, f"{tier.name} has left over {found - named - trash}"

    async def check_at_rest(self) -> None:
        """Nothing is open: no room is reserved, nothing is thrown away but not unlinked."""
        await self.objects.sealing.mappings.look()
        assert not self.ledger.table.open
        for ino in list(self.ledger.orphans.rooms):
            self.ledger.removals.purge(ino)  # the kernel forgets what was unlinked
        await self.dispatcher.trash.empty()
        self.ledger.trash.count()
        await self.dispatcher.trash.empty()
        self.check()
        assert not self.ledger.trash.mapped
        assert all(tier.reserved == 0 for tier in self.tiers)
        assert self.room.demoting.bytes == 0
        assert not self.dispatcher._jobs
        assert self.backings.taken == self.fast_ids()
        assert self.dispatcher.hydration is None or not self.dispatcher.hydration.downloader.reading


@contextmanager
def world(tmp: Path, *, folders: int = 8, **options: object) -> Iterator[World]:
    with few_folders(folders):
        made = World(tmp, **options)  # type: ignore[arg-type]
        before = open_files()
        try:
            yield made
        finally:
            made.end()
        assert open_files() <= before


@contextmanager
def few_folders(number: int = 8) -> Iterator[None]:
    """Tiers made meanwhile have so many: making and listing 256 takes half of most tests."""
    with patch("kvfs.tiers.tier.FANOUT", number), patch("kvfs.tiers.ram.FANOUT", number):
        yield


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def digest(content: bytes) -> bytes:
    return xxhash.xxh3_128(content).digest()
