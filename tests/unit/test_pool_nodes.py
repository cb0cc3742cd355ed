"""The live nodes of a pool, as a node follows them, and the events about a pool."""

from collections.abc import Callable
from typing import Any

import pytest
import trio.testing

from kvfs.core.pool.news import SELDOM_S, News
from kvfs.core.pool.nodes import NAMED, Nodes, named
from kvfs.core.pool.peers import RENEW_S
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LEASE_S
from kvfs.pool.records import Lease

ME = "me"


class FakeIndex:
    """An index with the nodes of `alive`, which renew their leases, and those of `dead`."""

    def __init__(self) -> None:
        self.alive: set[str] = {ME}
        self.seen: dict[str, float] = {}
        self.up = True
        self.full = False  # it keeps leases, and takes no times
        self.asked: list[str] = []

    async def nodes(self) -> dict[str, float]:
        if not self.up:
            raise IndexDownError("down")
        for node in () if self.full else self.alive:
            self.seen[node] = self.seen.get(node, 0.0) + RENEW_S
        return dict(self.seen)

    async def leases(self, nodes: list[str]) -> list[Lease | None]:
        self.asked += nodes
        return [
            Lease(node, "", "", host=node, mountpoint="/m") if node in self.alive else None
            for node in nodes
        ]

    def leave(self, node: str) -> None:
        self.alive.discard(node)
        self.seen.pop(node, None)


Told = list[tuple[str, list[str]]]


def run(test: Callable[[FakeIndex, Nodes, Told], Any]) -> None:
    """Run a test on an automatic clock."""

    async def main() -> None:
        index, told = FakeIndex(), Told()
        nodes = Nodes(index, ME, lambda how, names: told.append((how, names)))  # type: ignore[arg-type]
        await test(index, nodes, told)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def look(nodes: Nodes, seconds: float = RENEW_S) -> None:
    """Look as often as `Nodes.run` does in so many seconds."""
    for _ in range(round(seconds / RENEW_S)):
        await nodes.look()
        await trio.sleep(RENEW_S)


def test_nodes_come_and_go() -> None:
    async def test(index: FakeIndex, nodes: Nodes, told: Told) -> None:
        index.alive.add("a")
        index.seen["gone"] = 5.0  # long ago: it has no lease
        await look(nodes)
        assert (len(nodes), told) == (1, [])
        index.alive |= {"b", "c"}
        await look(nodes)
        assert [(how, sorted(names)) for how, names in told] == [("joined", ["b:/m", "c:/m"])]
        told.clear()
        index.leave("b")
        index.alive.discard("c")
        await look(nodes, LEASE_S + 2 * RENEW_S)
        assert sorted(told) == [("died", ["c:/m"]), ("left", ["b:/m"])]
        assert len(nodes) == 1
        told.clear()
        index.alive.add("c")
        await look(nodes)
        assert told == [("joined", ["c:/m"])]

    run(test)


def test_leases_of_known_nodes_are_not_asked_again() -> None:
    async def test(index: FakeIndex, nodes: Nodes, _: Told) -> None:
        index.alive.add("a")
        index.seen["gone"] = 5.0
        await look(nodes, 10 * RENEW_S)
        assert sorted(index.asked) == ["a", "gone"]

    run(test)


@pytest.mark.parametrize("how", ["down", "flushed"])
def test_index_that_was_away_takes_no_node_along(how: str) -> None:
    async def test(index: FakeIndex, nodes: Nodes, told: Told) -> None:
        index.alive |= {"a", "b"}
        await look(nodes)
        if how == "down":
            index.up = False
            await look(nodes, 10 * LEASE_S)
            index.up = True
        else:
            index.seen.clear()
            index.alive -= {"a", "b"}
            await look(nodes)  # this node is the first to be back
            index.alive |= {"a", "b"}
        await look(nodes, 10 * RENEW_S)
        assert (len(nodes), told) == (2, [])

    run(test)


def test_nodes_of_a_full_index_die_only_without_a_lease() -> None:
    async def test(index: FakeIndex, nodes: Nodes, told: Told) -> None:
        index.alive |= {"a", "b"}
        await look(nodes)
        index.full = True
        await look(nodes, 10 * LEASE_S)
        assert (len(nodes), told) == (2, [])
        index.alive.discard("b")
        await look(nodes, LEASE_S + 2 * RENEW_S)
        assert (len(nodes), told) == (1, [("died", ["b:/m"])])

    run(test)


def test_text_names_some_nodes() -> None:
    assert named(["a", "b"]) == "a, b"
    many = [str(number) for number in range(NAMED + 5)]
    assert named(many).endswith(f"{NAMED - 1} and 5 more")


def test_news_of_one_cause_comes_seldom() -> None:
    async def main() -> None:
        news, told = News(), list[object]()
        news.on_event = lambda kind, **facts: told.append((kind, facts))
        assert news.tell_seldom("conflict", "x", path="x/1")
        assert not news.tell_seldom("conflict", "x", path="x/2")
        assert news.tell_seldom("conflict", "y", path="y/1")
        await trio.sleep(SELDOM_S)
        assert news.tell_seldom("conflict", "x", path="x/3")
        news.tell("index up")
        news.tell("index up")
        paths = [{"what": "conflict", "path": path} for path in ("x/1", "y/1", "x/3")]
        up = {"what": "index up"}
        assert told == [("pool", facts) for facts in (*paths, up, up)]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
