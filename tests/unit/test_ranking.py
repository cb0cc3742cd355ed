"""The hottest and the largest objects, asked for without a mount."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.core.admin import ranking
from kvfs.core.admin.ranking import Ranking
from kvfs.errors import ConfigError
from tests.unit.world import World, world


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as found:
        yield found


@asynccontextmanager
async def walking(made: World) -> AsyncIterator[Ranking]:
    found = Ranking(made.lifecycle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        yield found
        nursery.cancel_scope.cancel()


def paths(answer: dict[str, Any]) -> list[str]:
    return [one["path"] for one in answer["objects"]]


def test_the_hottest_are_those_opened_most(made: World) -> None:
    async def case() -> None:
        for number, name in enumerate((b"a", b"b", b"c")):
            inode = await made.make_file(name, b"x" * 100)
            for _ in range(number):
                await made.read(inode.ino)
        async with walking(made) as found:
            answer = await found.objects("hot", 2)
        assert paths(answer) == ["c", "b"]
        first = answer["objects"][0]
        assert first["opens"] == 2
        assert first["size"] == 100
        assert first["tiers"] == ["ram"]
        assert first["namespace"] == "."
        assert answer["age_s"] == 0

    trio.run(case)


def test_the_largest_are_found_by_a_walk_in_steps_with_a_small_heap(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "STEP", 4)
    monkeypatch.setattr(ranking, "MOST", 3)

    async def case() -> None:
        made.namespace("n")
        for number in range(20):
            await made.make_file(b"n/%d" % number, b"x" * (number * 7 % 20))
        async with walking(made) as found:
            answer = await found.objects("large", 3)
            assert [one["size"] for one in answer["objects"]] == [19, 18, 17]
            assert {one["namespace"] for one in answer["objects"]} == {"n"}
            gone = made.at(answer["objects"][0]["path"].encode())
            made.ledger.removals.drop(gone, "evicted")
            await made.make_file(b"n/new", b"x" * 50)
            again = await found.objects("large", 3)
            assert [one["size"] for one in again["objects"]] == [18, 17], "not looked for so soon"

    trio.run(case, clock=trio.testing.MockClock(autojump_threshold=0))


def test_unknown_order_or_count_is_refused(made: World) -> None:
    async def case() -> None:
        found = Ranking(made.lifecycle)
        for order, count in (("best", 1), ("hot", 0), ("hot", 101), ("large", "x"), ("hot", 1.5)):
            with pytest.raises(ConfigError, match="expected"):
                await found.objects(order, count)

    trio.run(case)
