"""Prefetch of objects from a bucket ahead of their opens, and the objects that it leaves."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.capacity import victims
from kvfs.core.fetching import prefetch
from kvfs.s3.errors import StoreError
from tests.s3.faulty import Fault, FaultyStore
from tests.s3.memory import MemoryStore
from tests.unit.test_uploader import A, again, counters, faults
from tests.unit.world import MIB, World, world


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, store=FaultyStore(MemoryStore())) as found:
        trio.run(found.ledger.dirty.load)
        yield found
        trio.run(found.check_at_rest)


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await case()

    trio.run(main, clock=MockClock(rate=1))


async def spilled(made: World, names: Sequence[bytes], size: int = 1) -> list[Inode]:
    """Objects that only the bucket has, made one after the other."""
    inodes = []
    for name in names:
        *above, _ = name.split(b"/")
        if above and not made.catalog.lookup(ROOT_INO, above[0]):
            made.mkdir(above[0])
        inodes.append(await made.make_file(name, name * size))
        await made.upload_all()
        made.ledger.removals.evict(again(made, inodes[-1].ino))
    await made.dispatcher.trash.empty()
    return [again(made, inode.ino) for inode in inodes]


def block(number: int, parent: int = 0) -> bytes:
    """A prefix path."""
    key, before = (f"{one:016x}{0:016x}" for one in (number, parent))
    return f"{before}/{key}".encode()


def flat(count: int, first: int = 0) -> list[bytes]:
    """Names as LMCache's `fs` connector makes them."""
    return [
        b"m@1@0@%032x@bfloat16.data" % (number * 7919) for number in range(first, first + count)
    ]


async def read(made: World, inode: Inode) -> None:
    """And wait until nothing is fetched any more."""
    await made.read(inode.ino)
    await wait_all_tasks_blocked()


def here(made: World, inodes: list[Inode]) -> list[int]:
    """Which of them are in a tier."""
    holders = [made.ledger.tiers.holders(again(made, inode.ino)) for inode in inodes]
    return [number for number, where in enumerate(holders) if where]


def ahead(made: World) -> tuple[int, int, int]:
    """Prefetched, used, wasted."""
    found = counters(made)
    return (
        found.get("prefetched", 0),
        found.get("prefetch_used", 0),
        found.get("prefetch_wasted", 0),
    )


def test_after_two_in_order_the_next_four_come_then_more(made: World) -> None:
    async def case() -> None:
        inodes = await spilled(made, flat(64))
        await read(made, inodes[0])
        assert here(made, inodes) == [0]
        await read(made, inodes[1])
        assert here(made, inodes) == list(range(2 + prefetch.AT_FIRST))
        for number in range(2, 20):
            await read(made, inodes[number])
        found = here(made, inodes)
        assert found == list(range(len(found)))
        assert prefetch.AT_MOST // 2 <= len(found) - 20 <= prefetch.AT_MOST
        assert ahead(made) == (len(found) - 2, 18, 0)
        made.check()

    run(case)


def test_prefetch_ends_at_the_last_block(made: World) -> None:
    async def case() -> None:
        inodes = await spilled(made, flat(5))
        for inode in inodes:
            await read(made, inode)
        assert ahead(made) == (3, 3, 0)
        assert counters(made)["downloads"] == 5

    run(case)


def test_opens_in_no_order_bring_nothing(made: World) -> None:
    async def case() -> None:
        inodes = await spilled(made, flat(64))
        for number in (40, 20, 60, 0, 30, 10):
            await read(made, inodes[number])
        assert here(made, inodes) == [0, 10, 20, 30, 40, 60]
        assert ahead(made) == (0, 0, 0)

    run(case)


def test_prefetch_off_fetches_nothing_ahead(made: World) -> None:
    async def case() -> None:
        made.namespace("n", prefetch="off")
        inodes = await spilled(made, [b"n/%s" % name for name in flat(8)])
        for inode in inodes[:4]:
            await read(made, inode)
        assert here(made, inodes) == [0, 1, 2, 3]

    run(case)


def test_names_that_say_the_order_are_believed(made: World) -> None:
    """Two prompts with one beginning, made in turns; the reader follows the older one."""

    async def case() -> None:
        trunk = [block(number, number - 1) for number in range(1, 5)]
        one = [block(11, 4), *(block(number, number - 1) for number in range(12, 20))]
        two = [block(21, 4), *(block(number, number - 1) for number in range(22, 30))]
        inodes = await spilled(made, trunk)
        mixed = await spilled(made, [name for pair in zip(one, two, strict=True) for name in pair])
        first, second = mixed[::2], mixed[1::2]
        await read(made, inodes[0])
        await read(made, inodes[1])
        assert here(made, inodes) == [0, 1, 2, 3]
        assert here(made, second) == [0, 1], "the newest of two that come after a block"
        assert here(made, first) == []
        for inode in (inodes[2], inodes[3], first[0]):
            await read(made, inode)
        assert here(made, first) == list(range(1 + prefetch.AT_FIRST))
        for inode in first[1:]:
            await read(made, inode)
        assert here(made, first) == list(range(len(first)))
        made.check()

    run(case)


def test_files_of_one_block_come_together(made: World) -> None:
    async def case() -> None:
        names = [
            b"m_0123456789ab_r%d/%03x/%02x_g0/%016x.bin" % (rank, block, block, block)
            for block in range(12)
            for rank in (0, 1)
        ]
        for name in names:
            above: list[bytes] = []
            for part in name.split(b"/")[:-1]:
                above.append(part)
                if not exists(made, b"/".join(above)):
                    made.mkdir(b"/".join(above))
        inodes = await spilled(made, names)
        await read(made, inodes[0])
        await read(made, inodes[1])
        assert here(made, inodes) == [0, 1], "two files of one block are no step"
        await read(made, inodes[2])
        assert here(made, inodes) == [0, 1, 2, *range(4, 4 + 2 * prefetch.AT_FIRST)]
        for number in range(3, 24):
            await read(made, inodes[number])
        assert here(made, inodes) == list(range(24))
        assert ahead(made)[1] == ahead(made)[0]

    run(case)


def exists(made: World, path: bytes) -> bool:
    above, _, name = path.rpartition(b"/")
    return made.tree.entry(made.at(above).ino, name) is not None


def test_several_threads_read_one_prefix(made: World) -> None:
    async def case() -> None:
        inodes = await spilled(made, flat(40))
        order = [number ^ 1 for number in range(2, 38)]
        for number in (0, 1, *order):
            await read(made, inodes[number])
        assert set(range(38)) <= set(here(made, inodes))
        assert ahead(made)[1] == 36, "all but the first two were there before"

    run(case)


def test_open_takes_over_a_running_prefetch(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        assert made.dispatcher.hydration is not None
        inodes = await spilled(made, flat(8))
        await read(made, inodes[0])
        calls = faults(made).calls
        go = trio.Event()
        made.remote.before = go.wait
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.read, inodes[1].ino)
            await wait_all_tasks_blocked()
            budget = made.dispatcher.hydration.budget
            assert (budget.count, budget.ahead_count, budget.waiting) == (3, 2, 2)
            nursery.start_soon(made.read, inodes[5].ino)  # not yet begun
            await wait_all_tasks_blocked()
            nursery.start_soon(made.read, inodes[2].ino)  # under way
            await wait_all_tasks_blocked()
            assert (budget.count, budget.ahead_count) == (4, 1), "two opens more"
            go.set()
        await wait_all_tasks_blocked()
        assert here(made, inodes) == list(range(8))
        assert calls["get"] == 7, "none is fetched twice, and one was before"
        made.check()

    run(case)


@pytest.mark.parametrize("happening", ["unlink", "rewrite", "drop", "down", "elsewhere", "idle"])
def test_unwanted_prefetch_is_not_begun(made: World, happening: str) -> None:
    async def case() -> None:
        assert made.remote is not None
        assert made.bucket is not None
        made.namespace("n")
        names = [b"n/" + name for name in flat(8)]
        inodes = await spilled(made, names)
        await read(made, inodes[0])
        go = trio.Event()
        made.remote.before = go.wait
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.read, inodes[1].ino)
            await wait_all_tasks_blocked()
            assert made.dispatcher.hydration is not None
            assert made.dispatcher.hydration.budget.waiting == 2
            waiting = inodes[4:6]
            if happening == "unlink":
                for inode, name in zip(waiting, names[4:6], strict=True):
                    made.tree.unlink(again(made, inode.ino).links[0][0], name[2:])
            elif happening == "rewrite":
                for inode in waiting:
                    held = await made.objects.open(inode.ino, writable=True, truncate=True)
                    made.write(held, A)
                    await made.close(held, writable=True)
            elif happening == "drop":
                made.drop("n")
            elif happening == "down":
                made.bucket.health.unanswered(0.0, "cut off")
            elif happening == "idle":
                clock = trio.lowlevel.current_clock()
                assert isinstance(clock, MockClock)
                clock.jump(prefetch.IDLE + 1)
            else:
                assert made.dispatcher.prefetch is not None
                made.dispatcher.prefetch.end()
            go.set()
        await wait_all_tasks_blocked()
        assert counters(made)["downloads"] <= 4, "two more were under way"
        assert all(made.ledger.table.inode(one.ino) is None or one.ino for one in waiting)
        await made.dispatcher.trash.empty()
        await made.walk()

    run(case)


def test_unexpected_branch_cancels_prefetches_that_are_not_begun(made: World) -> None:
    async def case() -> None:
        assert made.remote is not None
        trunk = await spilled(made, [block(number, number - 1) for number in range(1, 4)])
        other = await spilled(made, [block(11, 2), block(12, 11)])
        guessed = await spilled(made, [block(n, 2 if n == 21 else n - 1) for n in range(21, 30)])
        await read(made, trunk[0])
        go = trio.Event()
        made.remote.before = go.wait
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.read, trunk[1].ino)
            await wait_all_tasks_blocked()
            nursery.start_soon(made.read, other[0].ino)
            await wait_all_tasks_blocked()
            go.set()
        await wait_all_tasks_blocked()
        assert here(made, other) == [0, 1]
        assert here(made, guessed) == [0, 1], "what was under way"

    run(case)


def test_failures_ahead_are_no_miss(made: World) -> None:
    async def case() -> None:
        assert made.dispatcher.hydration is not None
        inodes = await spilled(made, flat(2))
        faults(made, Fault("get", 0, StoreError("odd")))
        for inode in inodes:
            assert made.dispatcher.hydration.ahead(inode, _Wants())
        await wait_all_tasks_blocked()
        assert here(made, inodes) == []
        faults(made)
        for inode in inodes:
            await read(made, inode)
        assert made.ledger.counters["misses"] == 0

    run(case)


def test_unopened_prefetch_counts_as_wasted_and_frees_its_share(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        assert made.ram is not None
        monkeypatch.setattr(prefetch, "SHARE", made.ram.capacity // (3 * 4096))
        inodes = await spilled(made, flat(32))
        await read(made, inodes[0])
        await read(made, inodes[1])
        assert ahead(made) == (4, 0, 0), "three in RAM, the others below"
        holders = [made.ledger.tiers.holders(again(made, inode.ino)) for inode in inodes[2:6]]
        assert sorted(tier.name for where in holders for tier in where) == ["nvme", *["ram"] * 3]
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(prefetch.UNUSED + 1)
        assert made.dispatcher.prefetch is not None
        made.dispatcher.prefetch.expire()
        assert ahead(made) == (4, 0, 4)

    run(case)


def test_prefetch_evicts_no_recently_used_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MIB // 2

    async def case(made: World) -> None:
        inodes = await spilled(made, flat(12), size // 57)
        for number in range(100):
            await made.make_file(b"new%d" % number, bytes(size))
            await made.upload_all()
        before = set(made.listed("ram_only"))
        await read(made, inodes[0])
        await read(made, inodes[1])
        assert here(made, inodes) == [0, 1], "all that is here was used lately"
        monkeypatch.setattr(victims, "LATELY", 0)
        await read(made, inodes[2])
        await read(made, inodes[3])
        assert {2, 3, 6, 7} <= set(here(made, inodes))
        assert set(made.listed("ram_only")) != before
        made.check()

    with world(tmp_path, ram=4 * MIB, nvme=0, store=FaultyStore(MemoryStore())) as made:
        monkeypatch.setattr(prefetch, "SHARE", 1)
        run(lambda: case(made))


def test_prefetch_evicts_no_object_that_the_bucket_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        monkeypatch.setattr(victims, "LATELY", 0)
        made.namespace("local", media="ram")
        inodes = await spilled(made, flat(6), MIB // 90)
        for number in range(6):
            await made.make_file(b"local/%d" % number, bytes(MIB // 2))
        assert made.dispatcher.hydration is not None
        assert made.dispatcher.prefetch is not None
        for inode in inodes:
            made.dispatcher.hydration.ahead(inode, _Wants())
        await wait_all_tasks_blocked()
        assert len(made.tree.list_entries(made.at(b"local").ino, 2, 10).entries) == 6
        made.check()

    with world(tmp_path, ram=4 * MIB, nvme=0, store=FaultyStore(MemoryStore())) as made:
        run(lambda: case(made))


class _Wants:
    """A prefetch request that takes every object."""

    def wanted(self, inode: Inode) -> bool:  # noqa: ARG002
        return True

    def admit(self, inode: Inode, tier: object, cost: int) -> bool:  # noqa: ARG002
        return True

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:
        """Accept any result."""


def test_the_order_is_known_again_after_a_restart(made: World) -> None:
    async def before() -> None:
        await spilled(made, [block(number, number - 1) for number in range(9, 0, -1)])

    async def after() -> None:
        await made.census()
        inodes = [made.at(block(number, number - 1)) for number in range(1, 10)]
        await read(made, inodes[0])
        await read(made, inodes[1])
        assert here(made, inodes) == list(range(2 + prefetch.AT_FIRST))
        assert [name for name, _, _ in made.tree.list_entries(ROOT_INO, 2, 10).entries]

    run(before)
    made.restart()
    run(after)
