"""Random walks over the life of objects; what must always hold is checked at each step.

A failure is repeated by its seed, which is in the name of the test.
"""

import os
import random
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from kvfs.catalog import ROOT_INO
from kvfs.core.capacity import bounds
from kvfs.core.ledger import census
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.names import walks
from kvfs.core.objects.files import BackingFiles
from kvfs.errors import (
    ConfigError,
    ExistsError,
    InvalidError,
    IsADirError,
    NoSpaceError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    OtherNamespaceError,
    QuotaError,
    StaleError,
    TierError,
)
from kvfs.tiers import Tier
from tests.unit.fast_gate import TableGate
from tests.unit.world import MIB, World, world

T = TypeVar("T")
NAMES = [b"a.kv", b"b.kv", b"c.kv", b"d.pt", b"e.pt", b"f", b"g", b"h"]
SIZES = (0, 1, 5000, 70_000, 300_000)
RAM, NVME = 2 * MIB, 3 * MIB  # small, so that there is always something to be thrown out


@dataclass(eq=False)
class File:
    """The expected state of an object."""

    ino: int
    names: set[bytes]
    content: bytearray = field(default_factory=bytearray)
    shaky: bool = False  # was being written when the daemon died: may be a miss

    def write(self, content: bytes, at: int) -> None:
        if content:
            self.content.extend(bytes(max(0, at + len(content) - len(self.content))))
            self.content[at : at + len(content)] = content

    def truncate(self, size: int) -> None:
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))


@dataclass(eq=False)
class Opened:
    """A handle. fast: its number in the gate's table, which serves it until it is taken out."""

    opened: OpenObject | None
    writable: bool
    file: File
    fast: int = 0
    gate: TableGate | None = None

    @property
    def in_table(self) -> bool:
        return self.gate is not None and self.fast in self.gate.handles

    @property
    def held(self) -> OpenObject:
        if self.opened is None:
            assert self.gate is not None
            self.opened = self.gate.adopted[self.fast]
        return self.opened


class Walk:
    """Does something at random, to kvfs and to a model of it."""

    def __init__(self, made: World, seed: int) -> None:
        self.world = made
        self.random = random.Random(seed)
        self.files: dict[bytes, File] = {}
        self.handles: list[Opened] = []
        self.operations: dict[Callable[[], Awaitable[None]], int] = {
            self.create: 6,
            self.open_to_read: 6,
            self.open_to_write: 3,
            self.write: 6,
            self.flush: 2,
            self.close: 12,
            self.truncate: 2,
            self.unlink: 2,
            self.rename: 3,
            self.link: 1,
            self.demote: 5,
            self.promote: 5,
            self.settle: 2,
            self.make_room: 1,
            self.grow: 2,
            self.read_all: 1,
        }
        if made.gate is not None:
            self.operations |= {self.open_fast: 12, self.see: 1, self.change_settings: 1}
        self.fast_opens = 0
        self.meanwhile = [
            self.create,
            self.open_to_read,
            self.open_to_write,
            self.write,
            self.close,
            self.truncate,
            self.unlink,
            self.rename,
            self.make_room,
        ]

    # The model

    def forget_dropped(self) -> None:
        """Eviction has told of the names that it took."""
        for parent, name, ino in self.world.gone:
            assert parent == ROOT_INO
            assert not any(opened.file.ino == ino for opened in self.handles), "an open file went"
            file = self.files.pop(name)
            assert file.ino == ino
            file.names.remove(name)
        self.world.gone.clear()

    def forget_unfinished(self) -> None:
        """A restart has dropped what was being written."""
        for name, file in list(self.files.items()):
            if self.world.catalog.lookup(ROOT_INO, name) is None:
                assert file.shaky
                self.remove(name)

    def pick(self) -> tuple[bytes, File] | None:
        self.forget_dropped()
        return self.random.choice(list(self.files.items())) if self.files else None

    def handle(self, *, writable: bool) -> Opened | None:
        able = [opened for opened in self.handles if opened.writable or not writable]
        able = [opened for opened in able if not opened.in_table or self.random.random() < 0.5]
        return self.random.choice(able) if able else None

    def check_names(self) -> None:
        self.forget_dropped()
        entries = self.world.catalog.entries_after(ROOT_INO, 0, 100)
        assert {e.name: e.ino for e in entries} == {n: f.ino for n, f in self.files.items()}

    def remove(self, name: bytes) -> None:
        file = self.files.pop(name, None)
        if file is not None:
            file.names.remove(name)

    def add(self, name: bytes, file: File) -> None:
        file.names.add(name)
        self.files[name] = file

    # The possible steps

    async def step(self) -> None:
        operations, weights = zip(*self.operations.items(), strict=True)
        operation = self.random.choices(operations, weights)[0]
        await operation()

    async def create(self) -> None:
        name = self.random.choice(NAMES)
        try:
            held = await self.world.create(name)
        except ExistsError:
            assert name in self.files
            return
        except NoSpaceError:
            return
        self.forget_dropped()
        file = File(held.inode.ino, set())
        self.add(name, file)
        self.handles.append(Opened(held, writable=True, file=file))

    async def open_to_read(self) -> None:
        await self._open(writable=False, truncate=False)

    async def open_fast(self) -> None:
        """As the thread does it: of an object of the table, and without the daemon."""
        gate = self.world.gate
        assert gate is not None
        able = [file for file in self.files.values() if file.ino in gate.entries]
        if not able:
            return
        file = self.random.choice(able)
        handle = gate.open(file.ino)
        if handle:
            self.fast_opens += 1
            opened = Opened(None, writable=False, file=file, fast=handle, gate=gate)
            self.handles.append(opened)
            self.check_content(opened)

    async def see(self) -> None:
        self.world.ledger.fast_opens.see()
        self.world.ledger.fast_opens.record_times()

    async def change_settings(self) -> None:
        """The gate answers nothing until the table is empty."""
        self.world.ledger.fast_opens.empty()
        await trio.testing.wait_all_tasks_blocked()

    async def open_to_write(self) -> None:
        await self._open(writable=True, truncate=self.random.random() < 0.4)

    async def _open(self, *, writable: bool, truncate: bool) -> None:
        picked = self.pick()
        if picked is None:
            return
        name, file = picked
        try:
            held = await self.world.objects.open(file.ino, writable=writable, truncate=truncate)
        except NoSpaceError:
            assert truncate
            return
        except (NotFoundError, StaleError):
            self.forget_dropped()
            assert self.files.get(name) is not file or file.shaky
            return
        if truncate:
            file.truncate(0)
        opened = Opened(held, writable, file)
        self.handles.append(opened)
        file.shaky = file.shaky and not truncate
        self.check_content(opened)

    def check_content(self, opened: Opened) -> None:
        if opened.in_table:
            assert opened.gate is not None
            path = opened.gate.entries[opened.file.ino].path
            assert Path(path).read_bytes() == opened.file.content
            return
        found = self.world.content(opened.held)
        assert found == opened.file.content, f"{opened.held.inode}: wrong bytes"
        if opened.held.inode.sealed and not opened.held.writers:
            assert opened.held.inode.size == len(found)

    async def write(self) -> None:
        opened = self.handle(writable=True)
        if opened is None:
            return
        size = self.random.choice(SIZES)
        at = self.random.choice((0, len(opened.file.content), 100_000))
        content = self.random.randbytes(size)
        with suppress(OSError):  # the tmpfs is full: the kernel says so to the application
            written = os.pwrite(opened.held.fd, content, at)
            opened.file.write(content[:written], at)

    async def flush(self) -> None:
        opened = self.handle(writable=False)
        if opened is not None and not opened.in_table:
            self.world.objects.sealing.flush(opened.held, writable=opened.writable)

    async def close(self) -> None:
        opened = self.handle(writable=False)
        if opened is not None:
            self.check_content(opened)
            self.handles.remove(opened)
            if opened.gate is None or not opened.gate.release(opened.fast):
                await self.world.close(opened.held, writable=opened.writable)

    async def truncate(self) -> None:
        picked = self.pick()
        if picked is None:
            return
        name, file = picked
        size = self.random.choice((0, 0, 1, 9000, 400_000))
        try:
            await self.world.objects.truncate(file.ino, size)
        except NoSpaceError:
            return
        except (NotFoundError, StaleError):
            self.forget_dropped()
            assert self.files.get(name) is not file or file.shaky
            return
        file.truncate(size)

    async def unlink(self) -> None:
        picked = self.pick()
        if picked is None:
            return
        try:
            self.world.tree.unlink(ROOT_INO, picked[0])
        except NotFoundError:
            assert picked[1].shaky
        else:
            self.remove(picked[0])

    async def rename(self) -> None:
        picked = self.pick()
        if picked is None:
            return
        name, file = picked
        target = self.random.choice(NAMES)
        flags = self.random.choice((0, 0, 1, 2))
        try:
            self.world.renames.rename(ROOT_INO, name, ROOT_INO, target, flags)
        except (ExistsError, NotFoundError):
            return
        self.forget_dropped()
        other = self.files.get(target)
        if other is file:
            return
        self.remove(name)
        self.remove(target)
        self.add(target, file)
        if flags == 2 and other is not None:
            self.add(name, other)

    async def link(self) -> None:
        picked = self.pick()
        if picked is not None:
            target = self.random.choice(NAMES)
            with suppress(ExistsError):
                self.world.tree.link(picked[1].ino, ROOT_INO, target)
                self.add(target, picked[1])

    async def _job(self, job: Callable[[int], Awaitable[None]], inos: list[int]) -> None:
        """Now and then, something happens to any object just before or after the copying."""
        if not inos:
            return
        movers = self.world.movers
        free = movers.before is movers.after
        if free and self.random.random() < 0.5:
            when = self.random.choice(("before", "after"))
            setattr(movers, when, self._something)
        await job(self.random.choice(inos))

    async def _something(self) -> None:
        movers = self.world.movers
        movers.before = movers.after = _nothing
        for _ in range(self.random.randrange(1, 4)):
            await self.random.choice(self.meanwhile)()

    async def demote(self) -> None:
        await self._job(
            self.world.demote,
            [
                ino
                for ino in self.world.listed("ram_only")
                if not self.world.dispatcher.transfers.copy_is_useless(ino)
            ],
        )

    async def promote(self) -> None:
        on_nvme = self.world.listed("on_nvme")
        await self._job(
            self.world.promote,
            [ino for ino in on_nvme if not self.world.dispatcher.transfers.copy_is_useless(ino)],
        )

    async def settle(self) -> None:
        await self._job(self.world.settle, self.world.listed("on_nvme"))

    async def make_room(self) -> None:
        tier = self.random.choice(self.world.tiers)
        wanted = self.random.choice((100_000, MIB, tier.capacity // 2))
        with_open = {opened.file.ino for opened in self.handles}
        if self.world.room.reserve(tier, wanted):
            tier.reserved -= wanted
        for ino in with_open:
            assert self.world.ledger.table.inode(ino) is not None

    async def grow(self) -> None:
        """The watcher looks after files that have outgrown their reservations."""
        await trio.sleep(2 * bounds.PERIOD)

    async def read_all(self) -> None:
        await self.world.dispatcher.trash.empty()
        for name, file in list(self.files.items()):
            self.forget_dropped()
            if self.files.get(name) is file and not file.shaky:
                assert await self.world.read(file.ino) == file.content

    async def close_all(self) -> None:
        while self.handles:
            await self.close()


async def _nothing() -> None:
    pass


@pytest.fixture(params=[False, True], ids=["served", "passthrough"])
def passthrough(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize(("ram", "nvme"), [(RAM, NVME), (RAM, 0), (0, NVME), (RAM, MIB // 2)])
def test_accounts_are_right_after_every_operation(
    tmp_path: Path, seed: int, ram: int, nvme: int, *, passthrough: bool
) -> None:
    async def walk(made: World) -> None:
        if passthrough:
            made.answer_fast()
        walker = Walk(made, seed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.objects.sealing.bounds.watch)
            nursery.start_soon(made.ledger.fast_opens.run)
            for number in range(250):
                await walker.step()
                walker.check_names()
                made.check()
                if len(walker.handles) > 12:
                    await walker.close()
                if number % 60 == 59:
                    await walker.close_all()
                    await made.check_at_rest()
            nursery.cancel_scope.cancel()
        await walker.close_all()
        await walker.read_all()
        await made.check_at_rest()
        assert walker.fast_opens or not (passthrough and ram)

    with world(tmp_path, ram=ram, nvme=nvme, passthrough=passthrough) as made:
        trio.run(walk, made, clock=MockClock(autojump_threshold=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_accounts_are_right_after_every_restart(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, passthrough: bool
) -> None:
    """With and without a crash, a reboot, a lost RAM tier; a census under way is disturbed."""
    monkeypatch.setattr(census, "CENSUS_STEP", 2)

    async def life(made: World, walker: Walk) -> None:
        early = [walker.open_to_read, walker.unlink, walker.rename, walker.close, walker.flush]

        async def disturb() -> None:
            for _ in range(walker.random.randrange(12)):
                await walker.random.choice(early)()
                await trio.lowlevel.checkpoint()

        for _ in range(walker.random.randrange(4)):
            await walker.random.choice(early)()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.census)
            nursery.start_soon(disturb)
        for _ in range(60):
            walker.check_names()
            made.check()
            await walker.step()
        await walker.read_all()
        if walker.random.random() < 0.5:
            await walker.close_all()
            await made.check_at_rest()

    with world(tmp_path, ram=RAM, nvme=NVME, passthrough=passthrough) as made:
        walker = Walk(made, seed)
        for _ in range(8):
            trio.run(life, made, walker, clock=MockClock(autojump_threshold=0))
            walker.forget_dropped()
            crash, reboot = walker.random.random() < 0.6, walker.random.random() < 0.4
            if not crash:
                trio.run(walker.close_all)
                walker.forget_dropped()
            in_ram = {
                file.ino
                for file in walker.files.values()
                if made.ledger.tiers.holders(made.tree.inode(file.ino)) == [made.ram]
            }
            for file in walker.files.values():
                writing = any(o.file is file and o.writable for o in walker.handles)
                unsynced = crash and reboot and not made.tree.inode(file.ino).digest
                file.shaky |= writing or unsynced or (reboot and file.ino in in_ram)
            walker.handles.clear()
            made.restart(crash=crash, reboot=reboot)
            walker.forget_unfinished()


SPACES = [b"n1", b"n2", b"n3"]
SETTINGS = (
    {"eviction": "lru"},
    {"eviction": "never"},
    {"eviction": "adaptive"},
    {"eviction": "s3fifo"},
    {"pin": "on"},
    {"pin": "off"},
    {"quota_objects": "3"},
    {"quota_hard": "200K"},
    {"quota_hard": "0", "quota_objects": "0"},
    {"media": "ram"},
    {"media": "nvme"},
    {"media": "all"},
    {"publish": "close"},
    {"publish": "immediate"},
    {"ttl": "1h"},
    {"ttl": "0"},
    {"write": "through"},
    {"write": "back"},
)
NAMED = [b"m@2@%d@%x@half.data" % (rank, block) for rank in range(2) for block in range(3)]
KEPT = [b"m@1@0@%x@half.pt" % block for block in range(2)]
A_DAY = 86_400 * 10**9


class SpaceWalk:
    """Does something at random to namespaces and what is in them.

    No model says what must be there: what may not be lost is for other tests. Content is the
    inode's number, which every reader finds.
    """

    def __init__(self, made: World, seed: int) -> None:
        self.world = made
        self.random = random.Random(seed)
        self.handles: list[tuple[OpenObject, bool]] = []
        self.operations: dict[Callable[[], Awaitable[None]], int] = {
            self.create: 30,
            self.read: 15,
            self.rewrite: 8,
            self.close: 30,
            self.move: 12,
            self.unlink: 4,
            self.remove_directory: 2,
            self.link: 2,
            self.directory: 4,
            self.tell: 12,
            self.version: 3,
            self.drop: 3,
            self.age: 3,
            self.job: 15,
            self.make_room: 3,
            self.walk: 4,
        }

    def entries(self, *, directories: bool) -> list[tuple[int, bytes]]:
        """All that can be found, by walking from the top."""
        found: list[tuple[int, bytes]] = []
        way = [ROOT_INO]
        while way:
            parent = way.pop()
            for name, inode, _ in self.world.tree.list_entries(
                parent, 2, 1000, hidden=1000
            ).entries:
                if inode.is_dir:
                    way.append(inode.ino)
                if inode.is_dir is directories:
                    found.append((parent, name))
        return found

    def any_directory(self) -> int:
        tree = self.world.tree
        below = [tree.lookup(*entry).ino for entry in self.entries(directories=True)]
        return self.random.choice([ROOT_INO, *below])

    def any_file(self) -> tuple[int, bytes] | None:
        files = self.entries(directories=False)
        return self.random.choice(files) if files else None

    async def step(self) -> None:
        operations, weights = zip(*self.operations.items(), strict=True)
        operation = self.random.choices(operations, weights)[0]
        self.last = operation.__name__
        with suppress(*REFUSALS):
            await operation()

    async def create(self) -> None:
        name = self.random.choice(NAMES + NAMED + KEPT)
        held = await self.world.create(name, b"", self.any_directory())
        self.handles.append((held, True))
        self.write(held)

    def write(self, held: OpenObject) -> None:
        with suppress(OSError):  # the tmpfs is full: the kernel says so to the application
            os.ftruncate(held.fd, 0)
            os.pwrite(held.fd, self.content(held) * self.random.choice((1, 600, 9000)), 0)

    @staticmethod
    def content(held: OpenObject) -> bytes:
        return held.inode.ino.to_bytes(8, "big")

    async def read(self) -> None:
        await self._open(writable=False)

    async def rewrite(self) -> None:
        await self._open(writable=True)

    async def _open(self, *, writable: bool) -> None:
        file = self.any_file()
        if file is None:
            return
        ino = self.world.tree.lookup(*file).ino
        truncate = writable and self.random.random() < 0.5
        held = await self.world.objects.open(ino, writable=writable, truncate=truncate)
        self.handles.append((held, writable))
        if writable:
            self.write(held)
        else:
            found = self.world.content(held)
            assert found == self.content(held) * (len(found) // 8)

    async def close(self) -> None:
        if self.handles:
            held, writable = self.handles.pop(self.random.randrange(len(self.handles)))
            await self.world.close(held, writable=writable)

    async def close_all(self) -> None:
        while self.handles:
            await self.close()

    async def move(self) -> None:
        kind = self.random.random() < 0.5
        entries = self.entries(directories=kind)
        if entries:
            name = self.random.choice(SPACES + NAMES[:3] + NAMED + KEPT)
            flags = self.random.choice((0, 0, 0, 2))
            parent, old = self.random.choice(entries)
            self.world.renames.rename(parent, old, self.any_directory(), name, flags)

    async def unlink(self) -> None:
        if file := self.any_file():
            self.world.tree.unlink(*file)

    async def remove_directory(self) -> None:
        entries = self.entries(directories=True)
        if entries:
            self.world.tree.rmdir(*self.random.choice(entries))

    async def link(self) -> None:
        if file := self.any_file():
            ino = self.world.tree.lookup(*file).ino
            self.world.tree.link(ino, self.any_directory(), self.random.choice(NAMES))

    async def directory(self) -> None:
        name = self.random.choice(SPACES + NAMES[:3])
        self.world.tree.make(self.any_directory(), name, stat.S_IFDIR | 0o755, 0, 0)

    def top(self) -> str:
        return self.random.choice([*SPACES, b"."]).decode()

    async def tell(self) -> None:
        settings = self.random.choice(SETTINGS)
        if self.random.random() < 0.3:
            self.world.namespace(self.top(), **settings)
        else:
            self.world.tell(self.top(), **settings)

    async def version(self) -> None:
        name = self.top()
        lifecycle = self.world.lifecycle
        told = lifecycle.settings(lifecycle.directory(name)).version
        self.world.tell(name, version=str(told + 1))

    async def drop(self) -> None:
        self.world.drop(self.top())

    async def age(self) -> None:
        if file := self.any_file():
            ino = self.world.tree.lookup(*file).ino
            then = self.world.tree.now() - A_DAY
            self.world.attributes.change(ino, atime_ns=then, mtime_ns=then)

    async def job(self) -> None:
        world = self.world
        world.dispatcher.admission.budget = self.random.choice((0, 0, 1))
        world.dispatcher.breaker._quiet_until = 0.0
        kind = self.random.choice((world.demote, world.promote, world.settle))
        which = "ram_only" if kind == world.demote else "on_nvme"
        inos = [
            ino
            for ino in world.listed(which)
            if not world.dispatcher.transfers.copy_is_useless(ino)
        ]
        if inos:
            await kind(self.random.choice(inos))

    async def make_room(self) -> None:
        tier = self.random.choice(self.world.tiers)
        if self.world.room.reserve(tier, tier.capacity // 2):
            tier.reserved -= tier.capacity // 2

    async def walk(self) -> None:
        """Some steps of the background's, of which others happen in between."""
        steps = self.random.choice((1, 2, 5, 50))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.world.walks.run)
            nursery.start_soon(self.world.dispatcher.watch.quotas)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
                self.world.check_accounts()
            nursery.cancel_scope.cancel()


REFUSALS = (
    *(ExistsError, NotFoundError, StaleError, NoSpaceError, QuotaError, TierError, InvalidError),
    *(ConfigError, OtherNamespaceError, IsADirError, NotADirError, NotEmptyError),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_accounts_of_namespaces_are_right_after_every_operation(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds after a restart, too, in the middle of any background work."""
    monkeypatch.setattr(walks, "STEP", 2)

    async def life(made: World, walker: SpaceWalk) -> None:
        await made.census()
        for _ in range(150):
            await walker.step()
            try:
                made.check()
            except AssertionError as error:
                raise AssertionError(f"after {walker.last}") from error
            if len(walker.handles) > 8:
                with suppress(*REFUSALS):  # the file may be beyond its quota
                    await walker.close()

    async def end(made: World, walker: SpaceWalk) -> None:
        await walker.close_all()
        await made.walk()
        await made.check_at_rest()
        assert not made.ledger.namespaces._ended

    with world(tmp_path, ram=RAM, nvme=NVME) as made:
        walker = SpaceWalk(made, seed)
        for _ in range(4):
            trio.run(life, made, walker, clock=MockClock(autojump_threshold=0))
            if walker.random.random() < 0.5:
                trio.run(end, made, walker)
            walker.handles.clear()
            made.restart(crash=True, lose_ram=walker.random.random() < 0.3)
        trio.run(made.census)
        trio.run(end, made, walker)


class Hasty(BackingFiles):
    """Every wait for the disk takes a random number of turns of the loop."""

    random = random.Random()

    @classmethod
    async def io(cls, tier: Tier, call: Callable[[], T]) -> T:
        if not tier.slow:
            return call()
        for _ in range(cls.random.randrange(4)):
            await trio.lowlevel.checkpoint()
        found = call()
        for _ in range(cls.random.randrange(4)):
            await trio.lowlevel.checkpoint()
        return found


class Watch(trio.abc.Instrument):
    """Looks at the accounts between any two awaits."""

    def __init__(self, made: World) -> None:
        self.made = made
        self.failure: BaseException | None = None
        self.steps = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self.steps += 1
        if self.failure is None and self.steps % 3 == 0:
            try:
                self.made.check_accounts()
                self.made.check_names()
            except BaseException as error:  # noqa: BLE001 (trio would switch the instrument off)
                self.failure = error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_accounts_are_right_between_any_two_awaits(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, passthrough: bool
) -> None:
    """Many at once, each waiting for the disk in the middle of what it does."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio._core._run._r.seed(seed)
    Hasty.random.seed(seed)
    monkeypatch.setattr(trio.to_thread, "run_sync", _inline)
    made_watch: list[Watch] = []

    async def storm(made: World) -> None:
        dice = random.Random(seed)
        opened: list[tuple[OpenObject, bool]] = []

        async def one() -> None:
            for _ in range(100):
                await trio.lowlevel.checkpoint()
                with suppress(ExistsError, NotFoundError, StaleError, NoSpaceError):
                    await something()
                assert made_watch[0].failure is None

        async def something() -> None:
            name, other = dice.choice(NAMES[:5]), dice.choice(NAMES[:5])
            kind = dice.randrange(12)
            if kind < 2:
                opened.append((await made.create(name, bytes(dice.choice(SIZES))), True))
            elif kind < 5:
                writable = dice.random() < 0.5
                truncate = writable and dice.random() < 0.5
                ino = made.find(name).ino
                held = await made.objects.open(ino, writable=writable, truncate=truncate)
                if writable:
                    made.write(held, bytes(dice.choice(SIZES)))
                opened.append((held, writable))
            elif kind < 8 and opened:
                held, writable = opened.pop(dice.randrange(len(opened)))
                await made.close(held, writable=writable)
            elif kind == 8:
                made.tree.unlink(ROOT_INO, name)
            elif kind == 9:
                made.renames.rename(ROOT_INO, name, ROOT_INO, other, dice.choice((0, 2)))
            elif kind == 10:
                await made.objects.truncate(made.find(name).ino, dice.choice(SIZES))
            else:
                made.room.make_room(dice.choice(made.tiers))
                made.dispatcher.promotion.after = 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.dispatcher._dispatch, nursery)
            made.movers.before = made.movers.after = _some_turns
            async with trio.open_nursery() as workers:
                for _ in range(6):
                    workers.start_soon(one)
            for held, writable in opened:
                await made.close(held, writable=writable)
            made.dispatcher.demotion.reclaimable = 0
            while made.dispatcher.jobs or made.ledger.trash.files:
                await trio.lowlevel.checkpoint()
            for _ in range(20):  # a copy that is being thrown away counts on neither side
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await made.check_at_rest()

    with world(tmp_path, ram=RAM, nvme=NVME, passthrough=passthrough, files=Hasty) as made:
        made_watch.append(Watch(made))
        clock = MockClock(autojump_threshold=0.01)
        trio.run(storm, made, clock=clock, instruments=made_watch)
        if made_watch[0].failure is not None:
            raise made_watch[0].failure
        assert made_watch[0].steps > 500


async def _inline(call: Callable[..., T], *arguments: object, **_: object) -> T:
    """Threads would make each run another one."""
    await _some_turns()
    found = call(*arguments)
    await _some_turns()
    return found


async def _some_turns() -> None:
    for _ in range(Hasty.random.randrange(5)):
        await trio.lowlevel.checkpoint()
