"""Compressed copies on NVMe: how they are made, accounted, opened, and what may go wrong."""

import os
import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs import failpoints
from kvfs.catalog import ROOT_INO, Inode, PackedCopy
from kvfs.core.check import Finding, check
from kvfs.core.check.survey import Survey
from kvfs.core.moves import transfers
from kvfs.errors import KvfsError, NotFoundError, StaleError
from kvfs.movement import packing
from tests.s3.memory import MemoryStore
from tests.unit.test_packing import CODECS, numbers
from tests.unit.test_uploader import again, contents, counters
from tests.unit.world import MIB, World, world

KV = numbers(MIB // 2 + 1000)
OTHER = numbers(MIB // 2 + 2000, seed=9)
NOISE = random.Random(8).randbytes(len(KV))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(params=[False, True], ids=["alone", "with a bucket"])
def made(request: pytest.FixtureRequest, tmp_path: Path, store: MemoryStore) -> Iterator[World]:
    with world(tmp_path, store=store if request.param else None) as found:
        found.tell(".", compression="nvme")
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


async def demoted(made: World, name: bytes = b"a", content: bytes = KV) -> Inode:
    """An object in RAM that has a copy on NVMe."""
    inode = await made.store(name, content, made.ram)
    await made.demote(inode.ino)
    found = again(made, inode.ino)
    assert made.ledger.tiers.holders(found) == made.tiers
    made.check()
    return found


async def packed(made: World, name: bytes = b"a", content: bytes = KV) -> Inode:
    """An object of which there is a packed copy only."""
    inode = await demoted(made, name, content)
    made.ledger.records.remove_copy(inode, made.fast)
    found = again(made, inode.ino)
    assert made.ledger.tiers.holders(found) == [made.nvme]
    assert found.packed is not None
    made.check()
    return found


def on_nvme(made: World, inode: Inode) -> Path:
    return Path(made.disk.path(inode.ino, inode.version))


async def check_sound(made: World) -> None:
    """Check that fsck finds nothing, with all bytes read."""
    assert await find(made) == []


async def find(made: World, *, repair: bool = False, hashes: bool = True) -> list[Finding]:
    found: list[Finding] = []

    async def tell(finding: Finding) -> None:
        found.append(finding)

    survey = Survey(
        *(made.ledger, made.movers, made.dispatcher._jobs, tell),
        repair=repair,
        hashes=hashes,
        live=True,
    )
    await check(survey)
    return found


# Made


def test_a_copy_on_nvme_is_smaller_and_is_read_through_ram(made: World) -> None:
    async def case() -> None:
        inode = await demoted(made)
        assert inode.packed is not None
        assert inode.packed.codec in CODECS
        about = on_nvme(made, inode).stat()
        assert about.st_size == inode.packed.size < len(KV) / 1.8
        assert about.st_blocks == inode.packed.blocks
        assert about.st_mtime_ns == inode.backing_mtime_ns
        assert made.disk.used == about.st_blocks * 512
        assert made.fast.used == inode.blocks * 512 >= len(KV)
        space = made.ledger.namespaces.of(inode)
        assert space.bytes == made.fast.used, "a quota counts as if nothing was compressed"
        assert (
            space.held
            == {"ram": made.fast.used, "nvme": made.disk.used}
            | ({"s3": 0} if made.bucket is not None else {})
            or space.held["nvme"] == made.disk.used
        )
        made.ledger.records.remove_copy(inode, made.fast)
        made.check()
        before = made.disk.hits
        held = await made.objects.open(inode.ino, writable=False)
        assert held.tier is made.ram
        assert made.content(held) == KV
        await made.close(held, writable=False)
        assert made.disk.hits == before + 1
        after = again(made, inode.ino)
        assert made.ledger.tiers.holders(after) == made.tiers
        assert after.packed == inode.packed
        assert await made.read(inode.ino) == KV, "in RAM as any other"
        counted = made.disk.counters
        assert (counted["compressed"], counted["decompressed"]) == (1, 1)
        assert counted["compressed_bytes"] == len(KV)
        assert counted["compressed_to_bytes"] == inode.packed.size
        assert counted["compress_cpu_us"] > 0
        assert counted["decompress_cpu_us"] > 0
        assert counted["not_compressed"] == 0
        await check_sound(made)

    trio.run(case)


def test_incompressible_copy_is_plain_and_opened_on_nvme(made: World) -> None:
    async def case() -> None:
        inode = await demoted(made, content=NOISE)
        assert inode.packed is None
        assert made.disk.counters["not_compressed"] == 1
        assert made.disk.counters["compress_cpu_us"] > 0
        made.ledger.records.remove_copy(inode, made.fast)
        held = await made.objects.open(inode.ino, writable=False)
        assert held.tier is made.nvme
        assert made.content(held) == NOISE
        await made.close(held, writable=False)

    trio.run(case)


def test_small_sparse_and_too_large_copies_are_plain(made: World) -> None:
    async def case() -> None:
        small = await demoted(made, b"small", bytes(100) * 1000)
        assert small.packed is None
        held = await made.create(b"holes", b"x")
        os.ftruncate(held.fd, 4 * MIB)
        await made.close(held, writable=True)
        await made.demote(held.inode.ino)
        assert again(made, held.inode.ino).packed is None
        large = await demoted(made, b"large", numbers(MIB) * 5)
        assert large.blocks * 512 > made.fast.capacity // 2
        assert large.packed is None
        assert made.disk.counters["compressed"] == 0
        assert made.disk.counters["not_compressed"] == 0

    trio.run(case)


def test_a_large_one_is_demoted_alone_and_small_ones_together(made: World) -> None:
    async def case() -> None:
        inos = [
            (await made.store(name, content, made.ram)).ino
            for name, content in ((b"1", b"s"), (b"2", b"s"), (b"3", KV), (b"4", b"s"))
        ]
        space = made.ledger.namespaces.of(again(made, inos[0]))
        demotion = made.dispatcher.demotion
        assert demotion._oldest_in_ram(space, 16 * MIB) == inos[:2]
        for ino in inos[:2]:
            await made.demote(ino)
        assert demotion._oldest_in_ram(space, 16 * MIB) == [inos[2]]
        await made.demote(inos[2])
        assert demotion._oldest_in_ram(space, 16 * MIB) == [inos[3]]

    trio.run(case)


def test_compression_setting_applies_to_later_demotions(made: World) -> None:
    async def case() -> None:
        one = await packed(made)
        made.tell(".", compression="off")
        two = await demoted(made, b"b", OTHER)
        assert two.packed is None
        assert await made.read(one.ino) == KV
        assert await made.read(two.ino) == OTHER
        assert again(made, one.ino).packed is not None

    trio.run(case)


def test_source_with_another_digest_is_not_packed(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        await made.read(inode.ino)  # in RAM again, and the digest is known
        made.ledger.records.remove_copy(again(made, inode.ino), made.disk)
        await made.dispatcher.trash.empty()
        replace(Path(made.fast.path(inode.ino, inode.version)), OTHER[: len(KV)])
        await made.demote(inode.ino)
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert made.catalog.inode(inode.ino) is None

    trio.run(case)


# Opened


def to_ram(made: World) -> None:
    """It comes to where such copies come to."""
    assert made.ram is not None


def no_ram(made: World) -> None:
    made.sizes = (0, made.sizes[1])
    made.restart(lose_ram=True)


def elsewhere(made: World) -> None:
    made.tell(".", media="nvme")


def full(made: World) -> None:
    made.fast.reserved += made.fast.capacity - made.room.headroom


@pytest.mark.parametrize("why", [no_ram, elsewhere, full])
def test_packed_copy_without_room_in_ram_becomes_plain_on_nvme(
    made: World, why: Callable[[World], None]
) -> None:
    async def case() -> None:
        held = await made.objects.open(inode.ino, writable=False)
        assert held.tier is made.nvme
        assert made.content(held) == KV
        await made.close(held, writable=False)
        after = again(made, inode.ino)
        assert after.packed is None
        assert made.disk.used == after.blocks * 512 == on_nvme(made, inode).stat().st_blocks * 512
        await check_sound(made)

    inode = trio.run(packed, made)
    why(made)
    trio.run(made.ledger.dirty.load)
    trio.run(made.census)
    trio.run(case)
    if why is full:
        made.fast.reserved -= made.fast.capacity - made.room.headroom


def test_packed_copy_without_any_room_is_a_miss_and_stays(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        for tier in made.tiers:
            tier.reserved += tier.capacity
        with pytest.raises(NotFoundError, match="no tier has room"):
            await made.read(inode.ino)
        for tier in made.tiers:
            tier.reserved -= tier.capacity
        assert made.ledger.counters["opens_unreadable"] == 1
        assert await made.read(inode.ino) == KV

    trio.run(case)


@pytest.mark.parametrize("how", ["", "crash", "reboot"])
def test_next_daemon_knows_packed_copies(made: World, how: str) -> None:
    one, two = trio.run(packed, made), trio.run(packed, made, b"b", OTHER)
    trio.run(made.read, two.ino)
    made.restart(crash=bool(how), reboot=how == "reboot")
    trio.run(made.ledger.dirty.load)
    trio.run(made.census)
    made.check()
    assert trio.run(made.read, one.ino) == KV
    assert trio.run(made.read, two.ino) == OTHER
    trio.run(check_sound, made)


def test_opens_of_the_same_one_share_a_decompression(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        read: list[bytes] = []

        async def one() -> None:
            read.append(await made.read(inode.ino))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(one)
        assert read == [KV] * 5
        assert made.disk.counters["decompressed"] == 1

    trio.run(case)


def test_slow_unpacking_is_a_miss_and_a_later_open_finds_it(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        go = trio.Event()
        made.movers.before = go.wait
        for _ in range(2):
            with pytest.raises(NotFoundError, match="not decompressed within"):
                await made.read(inode.ino)
        go.set()
        while made.dispatcher.unpacking._running:
            await trio.lowlevel.checkpoint()
        assert made.objects.open_at_once(inode.ino) is not None
        await made.close(made.ledger.table.open[inode.ino], writable=False)
        assert made.disk.counters["decompressed"] == 1

    made.ledger.tiers.bucket.wait = 0.01
    trio.run(case)


def test_an_unmount_ends_it(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        reached = trio.Event()

        async def hang() -> None:
            reached.set()
            await trio.sleep_forever()

        made.movers.before = hang
        async with trio.open_nursery() as nursery:
            nursery.start_soon(misses, inode.ino)
            await reached.wait()
            made.dispatcher.unpacking.stop()
        made.movers.before = _nothing
        assert await made.read(inode.ino) == KV

    async def misses(ino: int) -> None:
        with pytest.raises(NotFoundError, match="given up"):
            await made.read(ino)

    trio.run(case)


def test_packed_copy_is_promoted_on_request(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        await made.promote(inode.ino)
        assert made.ledger.tiers.holders(again(made, inode.ino)) == made.tiers
        assert await made.read(inode.ino) == KV

    trio.run(case)


def test_a_writer_has_it_decompressed_and_the_packed_copy_goes(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        held = await made.objects.open(inode.ino, writable=True)
        made.write(held, b"tail", len(KV))
        await made.close(held, writable=True)
        after = again(made, inode.ino)
        assert after.packed is None
        assert made.ledger.tiers.holders(after) == [made.ram]
        assert await made.read(inode.ino) == KV + b"tail"

    trio.run(case)


def test_a_rewrite_needs_none_of_its_bytes(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        held = await made.objects.open(inode.ino, writable=True, truncate=True)
        made.write(held, OTHER)
        await made.close(held, writable=True)
        assert again(made, inode.ino).packed is None
        assert await made.read(inode.ino) == OTHER
        assert made.disk.counters["decompressed"] == 0

    trio.run(case)


def test_an_unlink_takes_it_along(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        made.tree.unlink(ROOT_INO, b"a")
        await made.dispatcher.trash.empty()
        assert not on_nvme(made, inode).exists()
        assert made.disk.used == 0

    trio.run(case)


# Changes during a job


async def unlinked(made: World, _: Inode) -> None:
    made.tree.unlink(ROOT_INO, b"a")
    await made.dispatcher.trash.empty()


async def dropped(made: World, inode: Inode) -> None:
    """Its room was needed: the opener has left by then, or it could not be."""
    made.ledger.removals.drop(again(made, inode.ino), "evicted")
    await made.dispatcher.trash.empty()


async def new_file(made: World, inode: Inode) -> None:
    await dropped(made, inode)
    await made.store(b"a", OTHER, made.ram)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", [to_ram, elsewhere])
@pytest.mark.parametrize("happens", [unlinked, dropped, new_file])
def test_object_removed_during_its_unpacking_stays_removed(
    made: World,
    happens: Callable[[World, Inode], Awaitable[None]],
    where: Callable[[World], None],
    when: str,
) -> None:
    async def case() -> None:
        inode = await packed(made)
        where(made)

        async def once() -> None:
            setattr(made.movers, when, _nothing)
            made.tell(".", media="all")
            await happens(made, inode)

        setattr(made.movers, when, once)
        with pytest.raises((StaleError, NotFoundError)):
            await made.read(inode.ino)
        assert made.catalog.inode(inode.ino) is None
        if happens is new_file:
            assert await made.read(made.find(b"a").ino) == OTHER

    trio.run(case)


async def _nothing() -> None:
    """Happens."""


# Damage


def replace(path: Path, content: bytes) -> None:
    """Replace a file's content, and keep its times, so that they do not show it."""
    about = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def flip(path: Path) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    replace(path, bytes(content))


def cut(path: Path) -> None:
    replace(path, path.read_bytes()[:-1])


def another(path: Path) -> None:
    """A sound one, of another object of the same size."""
    size = len(KV)
    source = path.parent / "x"
    source.write_bytes(OTHER[:size])
    packing.pack(str(source), str(path), size, 2)
    source.unlink()


@pytest.mark.parametrize("damage", [flip, cut, another, Path.unlink])
def test_a_damaged_one_is_never_given_out(made: World, damage: Callable[[Path], None]) -> None:
    async def case() -> None:
        inode = await packed(made)
        damage(on_nvme(made, inode))
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        assert made.catalog.inode(inode.ino) is None
        kind = "missing" if damage is Path.unlink else "quarantined"
        await made.dispatcher.trash.empty()
        assert made.ledger.counters[kind] == 1

    trio.run(case)


@pytest.mark.parametrize("made", [True], indirect=True)
def test_damaged_packed_copy_is_hydrated_from_the_bucket(made: World) -> None:
    async def case() -> None:
        inode = await packed(made)
        await made.upload_all()
        flip(on_nvme(made, inode))
        assert await made.read(inode.ino) == KV
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert counters(made)["downloads"] == 1
        assert again(made, inode.ino).packed is None

    trio.run(case)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_check_finds_damage(made: World, damage: Callable[[Path], None]) -> None:
    async def case() -> None:
        inode = await packed(made)
        damage(on_nvme(made, inode))
        kinds = {flip: "damaged", cut: "damaged", Path.unlink: "missing"}
        assert [one.kind for one in await find(made)] == [kinds[damage]]
        assert [one.state for one in await find(made, repair=True)] == ["repaired"]
        await check_sound(made)
        with pytest.raises(KvfsError):
            await made.read(inode.ino)

    trio.run(case)


@pytest.mark.parametrize("by", ["open", "check", "upload"])
def test_plain_copy_with_a_packed_record_is_known_by_its_size(
    made: World, store: MemoryStore, by: str
) -> None:
    """A daemon died between the two."""

    async def case() -> None:
        inode = await packed(made)
        path = on_nvme(made, inode)
        replace(path, KV)
        if by == "check":
            assert [(one.kind, one.state) for one in await find(made, repair=True)] == [
                ("unpacked", "repaired")
            ]
        elif by == "upload" and made.bucket is not None:
            await made.upload_all()
            assert contents(store) != {}
        assert await made.read(inode.ino) == KV
        assert again(made, inode.ino).packed is None
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.nvme]
        assert made.disk.used == path.stat().st_blocks * 512
        await check_sound(made)

    trio.run(case)


@pytest.mark.parametrize("point", ["movement.unpack", "movement.unpack.written", "catalog.commit"])
@pytest.mark.parametrize("where", [to_ram, elsewhere])
def test_refused_unpacking_is_a_miss_that_changes_nothing(
    made: World, where: Callable[[World], None], point: str
) -> None:
    async def case() -> None:
        inode = await packed(made)
        where(made)
        failpoints.arm(f"{point}=raise:EIO")
        with pytest.raises(NotFoundError):
            await made.read(inode.ino)
        failpoints.arm("")
        assert made.ledger.counters["opens_unreadable"] == 1
        assert await made.read(inode.ino) == KV

    trio.run(case)


@pytest.mark.parametrize("when", ["before it is opened", "while it is waited for"])
def test_a_disk_that_is_down_is_a_miss_at_once(made: World, when: str) -> None:
    async def case() -> None:
        inode = await packed(made)
        down = [partial(made.disk.health.probed, at, "probe: EIO") for at in (1.0, 2.0, 3.0)]
        go = trio.Event()

        async def fail() -> None:
            for one in down:
                one()
            assert made.disk.health.down
            await go.wait()

        made.movers.before = fail
        if when == "before it is opened":
            go.set()
            await fail()
        began = trio.current_time()
        with pytest.raises(NotFoundError, match="is on NVMe only, which is down: probe: EIO"):
            await made.read(inode.ino)
        assert trio.current_time() - began < made.ledger.tiers.bucket.wait / 2
        go.set()
        made.movers.before = _nothing
        made.disk.health.state = "healthy"
        assert await made.read(inode.ino) == KV

    trio.run(case)


def test_read_error_of_unpacking_is_raised(tmp_path: Path) -> None:
    about = tmp_path.stat()
    copy = PackedCopy("blosc-zstd-s2/1", about.st_size, 8, bytes(16))
    with pytest.raises(IsADirectoryError):
        packing.unpack(str(tmp_path), str(tmp_path / "x"), copy, MIB, bytes(16), sync=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["movement.pack", "movement.pack.written", "catalog.commit"])
def test_a_demotion_that_is_refused_changes_nothing(made: World, point: str) -> None:
    async def case() -> None:
        inode = await made.store(b"a", KV, made.ram)
        failpoints.arm(f"{point}=raise:EIO")
        await made.demote(inode.ino)
        failpoints.arm("")
        assert made.ledger.tiers.holders(again(made, inode.ino)) == [made.ram]
        await made.demote(inode.ino)
        assert again(made, inode.ino).packed is not None
        assert await made.read(inode.ino) == KV

    trio.run(case)


# On its way up


@pytest.mark.parametrize("made", [True], indirect=True)
@pytest.mark.parametrize("setting", ["nvme", "s3", "off"])
def test_a_packed_copy_goes_up_as_it_is(made: World, store: MemoryStore, setting: str) -> None:
    async def case() -> None:
        inode = await packed(made)
        made.tell(".", compression=setting)
        file = on_nvme(made, inode).read_bytes()
        await made.upload_all()
        assert contents(store) == {"@0/a": file}
        stored = made.ledger.dirty.stored(inode.ino)
        assert stored is not None
        assert inode.packed is not None
        assert (stored.codec, stored.size) == (inode.packed.codec, len(file))
        assert "compressed" not in counters(made)
        made.ledger.removals.evict(again(made, inode.ino))
        await made.dispatcher.trash.empty()
        assert await made.read(inode.ino) == KV

    trio.run(case)


@pytest.mark.parametrize("made", [True], indirect=True)
@pytest.mark.parametrize(("setting", "plain"), [("nvme", False), ("off", True)])
def test_of_two_copies_the_packed_one_goes_up_if_that_is_wanted(
    made: World, store: MemoryStore, setting: str, *, plain: bool
) -> None:
    async def case() -> None:
        inode = await demoted(made)
        made.tell(".", compression=setting)
        await made.upload_all()
        assert (contents(store) == {"@0/a": KV}) == plain
        if not plain:
            assert contents(store) == {"@0/a": on_nvme(made, inode).read_bytes()}
        assert "compressed" not in counters(made)

    trio.run(case)


@pytest.mark.parametrize("made", [True], indirect=True)
def test_a_damaged_packed_copy_does_not_go_up(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await packed(made)
        flip(on_nvme(made, inode))
        await made.upload(inode.ino)
        assert contents(store) == {}
        await made.dispatcher.trash.empty()
        assert made.ledger.counters["quarantined"] == 1
        assert made.catalog.inode(inode.ino) is None

    trio.run(case)


@pytest.mark.parametrize("made", [True], indirect=True)
def test_an_open_does_not_wait_for_the_upload(made: World, store: MemoryStore) -> None:
    async def case() -> None:
        inode = await packed(made)
        assert made.remote is not None
        reached, go = trio.Event(), trio.Event()

        async def hang() -> None:
            reached.set()
            await go.wait()

        made.remote.before = hang
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.upload, inode.ino)
            await reached.wait()
            assert await made.read(inode.ino) == KV
            assert inode.ino in made.dispatcher._jobs, "it goes up still"
            go.set()
        assert not made.dispatcher._jobs
        assert again(made, inode.ino).in_bucket
        assert contents(store).keys() == {"@0/a"}
        assert made.ledger.tiers.holders(again(made, inode.ino)) == made.tiers

    trio.run(case)


# All of it


class Life:
    """Random steps on a few files, whose contents are known."""

    def __init__(self, made: World, seed: int) -> None:
        self.made = made
        self.dice = random.Random(seed)
        self.known: dict[bytes, bytes] = {}

    def content(self) -> bytes:
        size = self.dice.choice([100, 6000, 20_002, 50_000])
        return self.dice.choice([numbers(size // 2, self.dice.randrange(99)), NOISE[:size]])

    async def step(self) -> None:
        name, made = self.dice.choice([b"a", b"b", b"c", b"d"]), self.made
        if name not in self.known:
            self.known[name] = self.content()
            made.expect(name, self.dice.choice([None, MIB, MIB, MIB]))  # where it begins
            await made.store(name, self.known[name])
            return
        ino = made.find(name).ino
        acts: list[Callable[[bytes, int], Awaitable[None]]]
        acts = [self.read, self.demote, self.leave] * 2
        acts += [self.promote, self.append, self.rewrite, self.unlink]
        acts += [self.tell, self.upload, self.restart]
        await self.dice.choice(acts)(name, ino)

    async def read(self, name: bytes, ino: int) -> None:
        assert await self.made.read(ino) == self.known[name]

    async def promote(self, _: bytes, ino: int) -> None:
        await self.made.promote(ino)

    async def demote(self, _: bytes, ino: int) -> None:
        inode = again(self.made, ino)
        if self.made.ledger.tiers.holders(inode) == [self.made.ram]:
            await self.made.demote(ino)

    async def leave(self, _: bytes, ino: int) -> None:
        """One of two copies goes."""
        inode = again(self.made, ino)
        holders = self.made.ledger.tiers.holders(inode)
        if len(holders) > 1 or (holders and inode.in_bucket):
            self.made.ledger.records.remove_copy(inode, self.dice.choice(holders))
            await self.made.dispatcher.trash.empty()

    async def append(self, name: bytes, ino: int) -> None:
        held = await self.made.objects.open(ino, writable=True)
        self.made.write(held, b"tail", len(self.known[name]))
        await self.made.close(held, writable=True)
        self.known[name] += b"tail"

    async def rewrite(self, name: bytes, ino: int) -> None:
        self.known[name] = self.content()
        held = await self.made.objects.open(ino, writable=True, truncate=True)
        self.made.write(held, self.known[name])
        await self.made.close(held, writable=True)

    async def unlink(self, name: bytes, _: int) -> None:
        self.made.tree.unlink(ROOT_INO, name)
        for ino in list(self.made.ledger.orphans.rooms):
            self.made.ledger.removals.purge(ino)
        await self.made.dispatcher.trash.empty()
        del self.known[name]

    async def tell(self, *_: object) -> None:
        told = {
            "compression": self.dice.choice(["nvme", "nvme", "nvme", "s3", "off"]),
            "media": self.dice.choice(["all", "all", "all", "nvme+s3"]),
        }
        if self.made.bucket is None:
            told["media"] = told["media"].removesuffix("+s3")
        self.made.tell(".", **told)

    async def upload(self, *_: object) -> None:
        if self.made.bucket is not None:
            await self.made.upload_all()

    async def restart(self, *_: object) -> None:
        """Without a word, as a daemon dies; what is in RAM is there still."""
        self.made.restart(crash=True)
        await self.made.ledger.dirty.load()
        await self.made.census()


def test_whatever_happens_the_bytes_are_those_that_were_written(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    monkeypatch.setattr(transfers, "PACKED_LEAST", 4096)
    life = Life(made, seed)

    async def case() -> None:
        life.known[b"a"] = KV
        await packed(made)
        for _ in range(250):
            await life.step()
            made.check()
        for name, content in life.known.items():
            assert await made.read(made.find(name).ino) == content
        await check_sound(made)

    trio.run(case)
