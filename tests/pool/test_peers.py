"""Dead nodes in the index: their objects go, and those of nodes that came back do not."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from kvfs.core.pool import peers
from kvfs.core.pool.news import News
from kvfs.core.pool.peers import Peers
from kvfs.pool.credentials import Credentials
from kvfs.pool.index import Index
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Lease, Owner, PoolEntry
from kvfs.pool.servers import Servers
from tests.pool.servers import free_port, server
from tests.pool.test_index import LIFE, A, B, index, said

LATER = "fedcba9876543210"


def lease(node: str, life: str = LIFE) -> Lease:
    return Lease(node, life, "127.0.0.1:7000")


@asynccontextmanager
async def reader(port: int, lost: Callable[[], None] = lambda: None) -> AsyncIterator[Peers]:
    """The peers as a third node sees them."""
    async with index(port) as found:
        yield Peers(found, lambda: lease("c"), lost, News())


async def entry_of(index: Index, key: str) -> PoolEntry:
    (found,) = await index.find([key], patience=2.0)
    assert isinstance(found, PoolEntry)
    return found


async def dead_after_a_look(seen: Peers, entry: PoolEntry) -> list[Owner]:
    await seen.usable(entry, patience=2.0)
    return seen.dead(entry)


def test_dead_owners_leave_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(port: int) -> None:
        async with reader(port) as seen:
            await seen.index.renew(lease(B), "1" * 16, 0)
            await seen.index.announce([said("@0/x", b"x", A), said("@0/x", b"x", B)])
            await seen.index.announce([said("@0/y", b"y", A)])
            both, one = await entry_of(seen.index, "@0/x"), await entry_of(seen.index, "@0/y")
            assert await dead_after_a_look(seen, both) == []  # A may only be late
            monkeypatch.setattr(peers, "DEAD_S", 0)
            assert await dead_after_a_look(seen, both) == list(one.owners)
            assert not await seen.index.forget_owners("@0/x", one.owners)
            assert await seen.index.forget_owners("@0/y", one.owners)
            both = await entry_of(seen.index, "@0/x")
            assert [owner.node for owner in both.owners] == [B]
            assert await seen.index.find(["@0/y"], patience=2.0) == [None]

    run(case, tmp_path)


@pytest.mark.parametrize("tier", ["nvme", "ram"])
def test_the_owner_with_less_load_is_mostly_asked_first(tmp_path: Path, tier: str) -> None:
    """Unless it has no copy in RAM."""
    random.seed(24)

    async def case(port: int) -> None:
        async with reader(port) as seen:
            busy = replace(lease(A), load=float(2 << 30))
            for one in (busy, lease(B)):
                await seen.index.renew(one, "1" * 16, 0)
            first = said("@0/x", b"x", A)
            first = first._replace(owner=first.owner._replace(tier=tier))
            second = said("@0/x", b"x", B)
            second = second._replace(owner=second.owner._replace(tier="nvme"))
            await seen.index.announce([first, second])
            entry = await entry_of(seen.index, "@0/x")
            asked = [(await seen.usable(entry, patience=2.0))[0][0].node for _ in range(200)]
            assert asked.count(A) == 200 if tier == "ram" else 0 < asked.count(A) < 20

    run(case, tmp_path)


def test_an_entry_of_many_owners_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for more nodes than kvfs remembers forgets those that it knew."""

    async def case(port: int) -> None:
        async with reader(port) as seen:
            await seen.index.renew(lease(B), "1" * 16, 0)
            await seen.index.announce([said("@0/x", b"x", B)])
            entry = await entry_of(seen.index, "@0/x")
            assert [one.node for one, _ in await seen.usable(entry, patience=2.0)] == [B]
            monkeypatch.setattr(peers, "REMEMBERED", 1)
            await seen.index.announce([said("@0/x", b"x", A)])
            entry = await entry_of(seen.index, "@0/x")
            assert await seen.usable(entry, patience=2.0) == []
            assert await seen.alive(entry), "it asks again"

    run(case, tmp_path)


def test_node_that_came_back_keeps_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(port: int) -> None:
        async with reader(port) as seen:
            await seen.index.announce([said("@0/x", b"x", A)])
            entry = await entry_of(seen.index, "@0/x")
            monkeypatch.setattr(peers, "DEAD_S", 0)
            dead = await dead_after_a_look(seen, entry)
            again = said("@0/x", b"x", A, fresh=False)
            owner = again.owner._replace(incarnation=LATER)
            await seen.index.announce([again._replace(owner=owner)])
            assert not await seen.index.forget_owners("@0/x", dead)
            entry = await entry_of(seen.index, "@0/x")
            assert list(entry.owners) == [owner]

    run(case, tmp_path)


def test_node_that_was_away_for_long_announces_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(port: int) -> None:
        lost: list[int] = []
        async with reader(port, lambda: lost.append(1)) as seen:
            await seen.renew()
            await seen.renew()
            assert len(lost) == 1  # at the start
            monkeypatch.setattr(peers, "DEAD_S", 0)
            await seen.renew()
            assert len(lost) == 2

    run(case, tmp_path)


def test_index_is_not_down_before_a_try_has_failed() -> None:
    async def case() -> None:
        servers = Servers(PoolPlace.parse(f"redis://127.0.0.1:{free_port()}/kv"), Credentials())
        seen = Peers(Index(servers), lambda: lease("c"), lambda: None, News())
        await seen.renew()
        assert (seen.asked, seen.why) == (False, "it was not asked yet")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(servers.run)
            with trio.fail_after(10):
                while not seen.asked:
                    await trio.sleep(0.01)
                    await seen.renew()
            assert seen.why not in {"", "it was not asked yet"}
            nursery.cancel_scope.cancel()

    trio.run(case)


def run(case: Callable[[int], Awaitable[None]], tmp_path: Path) -> None:
    port = free_port()
    with server(tmp_path, port):
        trio.run(case, port)
