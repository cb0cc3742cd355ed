"""Random walks with a bucket below: marks are right after each step, bytes in the end."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvfs.core.bucket.upload import deletion
from kvfs.core.names import walks
from kvfs.s3.errors import OutageError
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_accounts import NVME, RAM, SpaceWalk, Walk
from tests.unit.test_uploader import contents
from tests.unit.world import World, world


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "STEP", 2)
    monkeypatch.setattr(deletion, "LOOK", 0.01)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@asynccontextmanager
async def emptying(made: World) -> AsyncIterator[None]:
    """Empty the trash beside all other steps, as the dispatcher does."""
    lock, empty = trio.Lock(), made.dispatcher.trash.empty

    async def empty_alone() -> None:
        async with lock:
            await empty()

    async def keep_on() -> None:
        while True:
            await empty_alone()
            await trio.sleep(0.05)

    made.dispatcher.trash.empty = empty_alone  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_on)
        yield
        nursery.cancel_scope.cancel()
    made.dispatcher.trash.empty = empty  # type: ignore[method-assign]


class Transport:
    """The steps of a walk that use the bucket."""

    world: World
    random: random.Random

    async def upload(self) -> None:
        made = self.world
        inos = [
            ino for ino in made.ledger.dirty if not made.dispatcher.transfers.copy_is_useless(ino)
        ]
        if inos and (ino := self.random.choice(inos)) not in made.dispatcher._jobs:
            await made.upload(ino)

    async def fail(self) -> None:
        store = self.world.bucket_store
        assert isinstance(store, FaultyStore)
        late = self.random.random() < 0.5
        store.faults = [Fault("any", 1, OutageError("out"), late=late)]
        store.calls.clear()
        await self.upload()
        store.faults = []

    async def delete(self) -> None:
        dispatcher = self.world.dispatcher.uploader
        assert dispatcher is not None
        if dispatcher.dirty.superseded.deletes:
            await dispatcher.deletion.delete_some()

    async def leave(self) -> None:
        ledger = self.world.ledger
        for inode in self.world.inodes():
            busy = inode.ino in ledger.table.open or inode.ino in ledger.table.busy
            busy |= inode.ino in self.world.dispatcher._jobs  # an open of it would wait for the job
            here = inode.in_bucket and ledger.tiers.holders(inode)
            if here and not busy and self.random.random() < 0.4:
                ledger.removals.evict(inode)


class BucketWalk(Transport, Walk):
    def __init__(self, made: World, seed: int) -> None:
        super().__init__(made, seed)
        self.operations |= {self.upload: 12, self.fail: 2, self.delete: 4, self.leave: 4}
        self.meanwhile.append(self.leave)

    async def upload(self) -> None:
        remote = self.world.remote
        assert remote is not None
        if self.random.random() < 0.5:
            setattr(remote, self.random.choice(("before", "after")), self._something_remote)
        await super().upload()
        remote.before = remote.after = _nothing

    async def _something_remote(self) -> None:
        remote = self.world.remote
        assert remote is not None
        remote.before = remote.after = _nothing
        for _ in range(self.random.randrange(1, 4)):
            await self.random.choice(self.meanwhile)()


async def _nothing() -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ram", "nvme"), [(RAM, NVME), (RAM, 0), (0, NVME)])
def test_uploaded_objects_survive_and_the_bucket_equals_the_catalog(
    tmp_path: Path, store: MemoryStore, seed: int, ram: int, nvme: int
) -> None:
    print("seed", seed)

    async def walk(made: World) -> None:
        await made.ledger.dirty.load()
        walker = BucketWalk(made, seed)
        async with emptying(made), trio.open_nursery() as nursery:
            nursery.start_soon(made.objects.sealing.bounds.watch)
            for number in range(250):
                known = {inode.ino for inode in made.inodes() if inode.in_bucket}
                await walker.step()
                walker.check_names()
                made.check()
                lost = {ino for ino in known if made.catalog.inode(ino) is None}
                assert not lost & {file.ino for file in walker.files.values()}
                if len(walker.handles) > 12:
                    await walker.close()
                if number % 60 == 59:
                    await walker.close_all()
                    await made.check_at_rest()
            await walker.close_all()
            await walker.read_all()
            nursery.cancel_scope.cancel()
        await made.upload_all()
        here = {b"@0/" + name: file for name, file in walker.files.items()}
        files = [inode for inode in made.inodes() if inode.is_file and inode.links]
        first = {made.catalog.dentry(*inode.links[0]) for inode in files}
        names = {b"@0/" + entry.name for entry in first if entry is not None}
        found = {key.encode(): data for key, data in contents(store).items()}
        assert found.keys() == names
        assert all(data == here[key].content for key, data in found.items())
        await made.check_at_rest()

    with world(tmp_path, ram=ram, nvme=nvme, store=FaultyStore(store)) as made:
        trio.run(walk, made, clock=MockClock(autojump_threshold=0))


class BucketSpaceWalk(Transport, SpaceWalk):
    def __init__(self, made: World, seed: int) -> None:
        super().__init__(made, seed)
        self.operations |= {self.upload: 25, self.fail: 3, self.delete: 8, self.leave: 6}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_marks_are_right_whatever_becomes_of_namespaces(
    tmp_path: Path, store: MemoryStore, seed: int
) -> None:
    """In the end the bucket has what is here and is to be there, under its names, and no more."""
    print("seed", seed)

    async def life(made: World, walker: BucketSpaceWalk) -> None:
        await made.census()
        await made.ledger.dirty.load()
        async with emptying(made):
            for _ in range(150):
                await walker.step()
                try:
                    made.check()
                except AssertionError as error:
                    raise AssertionError(f"after {walker.last}") from error
                if len(walker.handles) > 8:
                    await walker.close()

    async def end(made: World, walker: BucketSpaceWalk) -> None:
        await made.ledger.dirty.load()
        await walker.close_all()
        await made.walk()
        for ino in list(made.ledger.orphans.rooms):
            made.ledger.removals.purge(ino)
        await made.upload_all()
        await made.check_at_rest()
        dirty, wanted = made.ledger.dirty, set()
        for inode in made.inodes():
            if inode.is_file and inode.in_bucket:
                stored = dirty.stored(inode.ino)
                assert stored is not None
                wanted.add(stored.key)
                if dirty.wanted(inode):
                    assert stored.key == dirty.key(inode)
        assert {key for key in store.objects if "/.kvfs/names/" not in key} == wanted

    with world(tmp_path, ram=RAM, nvme=NVME, store=FaultyStore(store)) as made:
        walker = BucketSpaceWalk(made, seed)
        for _ in range(4):
            trio.run(life, made, walker, clock=MockClock(autojump_threshold=0))
            if walker.random.random() < 0.5:
                trio.run(end, made, walker)
            walker.handles.clear()
            made.restart(crash=True, lose_ram=walker.random.random() < 0.3)
        trio.run(made.census)
        trio.run(end, made, walker)
