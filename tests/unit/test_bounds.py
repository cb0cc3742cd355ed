"""Limits hold between two looks at what is written; a file that is just closed is no obstacle."""

import mmap
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.core.capacity.bounds import CALM, PERIOD
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import NoSpaceError, NotFoundError, QuotaError
from kvfs.settings import Settings
from kvfs.tiers import Reservation
from tests.semantics.syscalls import opened
from tests.unit.world import World, world

M = 1 << 20
BLOCKS = [b"model@1@0@%x@half.data" % number for number in range(2)]  # one kind


def limit(made: World, **settings: str) -> None:
    made.ledger.namespaces.default.change(Settings.parse(settings))


def test_writes_of_the_daemon_count_before_the_next_look(tmp_path: Path) -> None:
    """Also what it writes at this moment: two of these four are in flight."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        bounds = made.objects.sealing.bounds
        files = [await made.create(b"%d" % number) for number in range(4)]
        for held in files[:2]:
            await made.objects.write(held, 0, b"x" * M)
        with ExitStack() as stack:
            for held, at, length in (
                (files[2], 0, M),
                (files[3], 0, M // 2),
                (files[2], M, M // 2),
            ):
                stack.enter_context(bounds.room_for_write(held, at, length))
            bounds.look()
            for held in files:
                with pytest.raises(QuotaError):
                    await made.objects.write(held, 3 * M, b"x" * M)
        bounds.look()
        await made.objects.write(files[3], 0, b"x" * 2 * M)
        for held in files:
            await made.close(held, writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_writer_that_rests_is_passed_by_until_it_grows(tmp_path: Path) -> None:
    """Or until its limit may have changed."""

    async def case(made: World) -> None:
        bounds, space = made.objects.sealing.bounds, made.ledger.namespaces.default
        made.expect(b"a", M)
        held = await made.create(b"a", b"x" * M)
        assert held.tier is made.fast
        while found := bounds.may_have_grown():
            bounds.look(found)
        assert not held.grows
        os.pwrite(held.fd, b"x" * M, M)
        bounds.look(bounds.may_have_grown())
        assert (held.grows, space.staged) == (True, 2 * M)
        while found := bounds.may_have_grown():
            bounds.look(found)
        limit(made, quota_hard="1M")
        while not (found := bounds.may_have_grown()):
            await trio.lowlevel.checkpoint()
        bounds.look(found)
        assert held.doom is not None
        with pytest.raises(QuotaError):
            await made.close(held, writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


def test_looks_are_rare_while_no_limit_is_near(tmp_path: Path) -> None:
    """A tier with little room, a quota and a file that is cut off each need frequent looks."""

    async def case(made: World) -> None:
        pause = made.objects.sealing.bounds.pause
        made.expect(b"a", M)
        held = await made.create(b"a", b"x" * M)
        assert held.tier is made.fast
        assert pause() == CALM
        with Reservation(made.fast, made.fast.free - made.room.headroom - M):
            assert pause() == PERIOD
        assert pause() == CALM
        limit(made, quota_hard="4M")
        assert pause() == PERIOD
        limit(made, quota_hard="0")
        assert pause() == CALM
        held.doom = QuotaError("cut off")
        assert pause() == PERIOD
        held.doom = None
        await made.close(held, writable=True)

    with world(tmp_path, ram=4096 * M) as made:
        trio.run(case, made)


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_is_just_closed_is_waited_for(tmp_path: Path, *, gone: bool) -> None:
    """Until its release it may not be dropped, and if it has no name any more it still counts."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        made.expect(BLOCKS[0], 3 * M)
        held = await made.create(b"a", b"x" * 3 * M)
        made.objects.sealing.flush(held, writable=True)
        if gone:
            made.tree.unlink(1, b"a")
        found: list[OpenObject] = []

        async def create() -> None:
            found.append(await made.create(BLOCKS[0]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create)
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            await made.objects.sealing.release(held, writable=True)
        await made.close(found[0], writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_file_that_stays_open_is_not_waited_for(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        made.expect(BLOCKS[0], 3 * M)
        held = await made.create(b"a", b"x" * 3 * M)
        for flushed in (False, True):
            if flushed:  # of a second descriptor of it
                made.objects.sealing.flush(held, writable=True)
            with pytest.raises((QuotaError, NoSpaceError)):
                await made.create(BLOCKS[0])
        await made.objects.sealing.release(held, writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize("lacking", ["quota", "room"])
def test_flushed_file_is_not_cut_off(tmp_path: Path, lacking: str) -> None:
    """Between FLUSH and RELEASE: its writer was told that all is well."""

    async def case(made: World) -> None:
        limit(made, quota_hard="8M" if lacking == "quota" else "0", eviction="never")
        held, other = await made.create(b"a"), await made.create(b"b")
        os.pwrite(held.fd, b"x" * 6 * M, 0)
        made.objects.sealing.flush(held, writable=True)
        os.pwrite(other.fd, b"y" * 5 * M, 0)
        made.objects.sealing.bounds.look()
        assert other.doom is not None
        assert held.doom is None
        await made.objects.sealing.release(held, writable=True)
        with pytest.raises((QuotaError, NoSpaceError)):
            await made.close(other, writable=True)
        assert made.find(b"a").size == 6 * M

    with world(tmp_path, ram=0, nvme=8 * M) as made:
        trio.run(case, made)


@pytest.mark.parametrize("lacking", ["quota", "room"])
def test_close_counts_bytes_written_since_the_last_look(tmp_path: Path, lacking: str) -> None:
    """Or a file could stay that was written and closed between two looks: of a namespace that
    loses nothing for good."""

    async def case(made: World) -> None:
        limit(made, quota_hard="8M" if lacking == "quota" else "0", eviction="never")
        kept = await made.create(b"a", b"x" * 6 * M)
        await made.close(kept, writable=True)
        made.expect(b"b", M)
        held = await made.create(b"b")
        os.pwrite(held.fd, b"y" * 3 * M, 0)
        with pytest.raises((QuotaError, NoSpaceError)):
            await made.close(held, writable=True)
        assert made.find(b"a").size == 6 * M
        with pytest.raises(NotFoundError):
            made.find(b"b")

    with world(tmp_path, ram=0, nvme=8 * M) as made:
        trio.run(case, made)


def test_file_that_is_just_closed_takes_no_room_from_others(tmp_path: Path) -> None:
    """The namespace furthest beyond its share gives room, once its file is released."""

    async def case(made: World) -> None:
        alice, bob = made.namespace("alice"), made.namespace("bob")
        small = await made.create(b"a", b"a" * M, alice.ino)
        await made.close(small, writable=True)
        large = await made.create(b"b", b"b" * 7 * M, bob.ino)
        made.objects.sealing.flush(large, writable=True)
        other = await made.create(b"c", b"c" * M, alice.ino)
        made.objects.sealing.bounds.look()
        assert large.doom is None
        assert other.doom is None
        assert made.ledger.table.inode(small.inode.ino) is not None
        await made.objects.sealing.release(large, writable=True)
        await made.close(other, writable=True)

    with world(tmp_path, ram=0, nvme=8 * M) as made:
        trio.run(case, made)


def test_a_file_is_cut_off_when_its_writer_goes_on_after_a_close(tmp_path: Path) -> None:
    """By another descriptor of it: a close of one of two says nothing of the other."""

    async def case(made: World) -> None:
        limit(made, quota_hard="8M")
        held = await made.create(b"a", b"x" * 6 * M)
        made.objects.sealing.flush(held, writable=True)
        os.pwrite(held.fd, b"y" * 3 * M, 6 * M)
        made.objects.sealing.bounds.look()
        assert held.doom is not None
        await made.objects.sealing.release(held, writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize("read", [False, True])
def test_file_too_large_at_its_close_is_dropped_even_if_open(tmp_path: Path, *, read: bool) -> None:
    """It came between two looks, so that its close is the first to see it."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        held = await made.create(b"a", b"x" * 6 * M)
        if read:
            await made.objects.open(held.inode.ino, writable=False)
        with pytest.raises(QuotaError):
            await made.close(held, writable=True)
        with pytest.raises(NotFoundError):
            made.find(b"a")
        assert made.ledger.namespaces.default.bytes == 0
        if read:
            path = held.tier.path(held.inode.ino, held.inode.version)
            assert os.stat(path).st_blocks == 0
            await made.close(held, writable=False)

    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize("ram", [0, 16 * M], ids=["nvme", "ram"])
@pytest.mark.parametrize("way", ["unlinked", "evicted", "rewritten", "expired"])
def test_mapped_bytes_count_after_the_unlink(tmp_path: Path, way: str, ram: int) -> None:
    """Under passthrough a mapping keeps the backing file, and no handle tells of it."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        space = made.ledger.namespaces.default
        made.expect(b"a", 3 * M)  # or it begins on NVMe
        await made.close(await made.create(b"a", b"x" * 3 * M), writable=True)
        inode = made.find(b"a")
        await made.close(await made.objects.open(inode.ino, writable=False), writable=False)
        (tier,) = made.ledger.tiers.holders(inode)
        assert tier is made.tiers[0]
        with opened(Path(tier.path(inode.ino, inode.version)), os.O_RDONLY) as file:
            mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        await go(made, way, inode.ino)
        await made.dispatcher.trash.empty()
        assert [*made.ledger.trash.count()] == [space]
        made.check()
        assert space.bytes == (4096 if way == "rewritten" else 0)
        assert space.unlinked == 3 * M
        assert tier.reserved >= 3 * M
        with pytest.raises(QuotaError, match=r"processes have 3.0 MiB of files mapped"):
            made.quota.keep(space, 2 * M)
        mapped.close()
        (left,) = made.ledger.trash.mapped
        assert not made.ledger.trash.look_at(left)
        await made.close(await made.create(b"b", b"x" * 2 * M), writable=True)
        await made.check_at_rest()

    async def go(made: World, way: str, ino: int) -> None:
        if way == "unlinked":
            made.tree.unlink(1, b"a")
            made.ledger.removals.purge(ino)
        elif way == "evicted":
            made.ledger.removals.evict(made.find(b"a"))
        elif way == "rewritten":
            held = await made.objects.open(ino, writable=True, truncate=True)
            await made.close(held, writable=True)
        else:
            limit(made, quota_hard="4M", ttl="1", ttl_from="write")
            made.find(b"a").mtime_ns = 0
            made.ledger.removals.drop(made.find(b"a"), "expired")

    with world(tmp_path, ram=ram) as made:
        trio.run(case, made)


def test_room_of_a_forgotten_inode_is_given_once(tmp_path: Path) -> None:
    """It is as gone as if it had gone at once."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        made.expect(BLOCKS[0], 3 * M)
        inode = await made.store(b"a", b"x" * 3 * M)
        made.tree.unlink(1, b"a")
        made.ledger.removals.forgotten(inode.ino)
        held = await made.create(BLOCKS[0])
        with pytest.raises(QuotaError):
            await made.create(BLOCKS[1])
        assert made.ledger.namespaces.default.unlinked == 0
        await made.close(held, writable=True)

    with world(tmp_path) as made:
        trio.run(case, made)


def test_an_unlinked_file_counts_until_the_kernel_forgets_it(tmp_path: Path) -> None:
    """And goes first where its namespace needs the room."""

    async def case(made: World) -> None:
        limit(made, quota_hard="4M")
        space = made.ledger.namespaces.default
        await made.close(await made.create(b"a", b"x" * 3 * M), writable=True)
        made.tree.unlink(1, b"a")
        assert (space.bytes, space.unlinked) == (0, 3 * M)
        await made.close(await made.create(b"b", b"x" * 2 * M), writable=True)
        assert (space.bytes, space.unlinked) == (2 * M, 0)

    with world(tmp_path) as made:
        trio.run(case, made)
