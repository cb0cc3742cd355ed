"""Which blocks of a request are loaded and saved, step by step."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvfs.client import PrefixCache
from kvfs.connectors import scheduling
from kvfs.connectors.paged import Load, Save
from kvfs.connectors.scheduling import EngineRequests, Plan
from tests.client.prompts import SPEC, TOKENS, blocks_of

PAGE = 2  # tokens; a block has 4
PAGES = list(range(100, 130))
KEYS = SPEC.keys(TOKENS)
CHAIN = [SPEC.root, *KEYS]


@dataclass
class Asked:
    request_id: str = "r"
    all_token_ids: list[int] = field(default_factory=lambda: list(TOKENS))
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path / "ns", SPEC, create=True) as opened:
        yield opened


def requests(cache: PrefixCache, *, loads: bool = True, saves: bool = True) -> EngineRequests:
    return EngineRequests(cache, PAGE, loads=loads, saves=saves)


def step(known: EngineRequests, request: Asked, tokens: int) -> Plan:
    plan = known.plan({request.request_id: tokens}, lambda _: PAGES)
    request.num_computed_tokens += tokens
    return plan


def test_computed_tokens_are_saved_once_in_whole_blocks(cache: PrefixCache) -> None:
    known, request = requests(cache), Asked()
    assert known.add(request)
    assert known.matched(request, 0) == 0
    assert step(known, request, 3) == ([], [])
    assert step(known, request, 6).saves == [Save(SPEC.root, KEYS[:2], PAGES[:4])]
    assert step(known, request, 3).saves == [Save(KEYS[1], KEYS[2:3], PAGES[4:6])]
    alike = Asked("alike")
    known.add(alike)
    assert step(known, alike, 16).saves == [Save(KEYS[2], KEYS[3:4], PAGES[6:8])]
    known.finished("r")
    assert known.plan({"r": 8}, lambda _: PAGES) == ([], [])


def test_tokens_that_are_not_known_are_not_saved(cache: PrefixCache) -> None:
    known, request = requests(cache), Asked(all_token_ids=TOKENS[:7])
    known.add(request)
    assert step(known, request, 9).saves == [Save(SPEC.root, KEYS[:1], PAGES[:2])]
    request.all_token_ids += TOKENS[7:9]
    assert step(known, request, 1).saves == [Save(KEYS[0], KEYS[1:2], PAGES[2:4])]


def test_the_last_token_is_not_loaded(cache: PrefixCache) -> None:
    cache.save(TOKENS, blocks_of(TOKENS))
    known = requests(cache)
    for length, matched in ((8, 6), (9, 8), (10, 8), (4, 2), (3, 0), (43, 40)):
        request = Asked(str(length), TOKENS[:length])
        known.add(request)
        assert known.matched(request, 0) == matched, length
    part = Asked("part", TOKENS[:9])
    known.add(part)
    assert known.matched(part, 6) == 2
    known.allocated(part, PAGES[:5], 2)
    # The second of block 1's two pages; the first one was there.
    assert step(known, part, 1) == ([Load("part", KEYS[0], KEYS[1:2], PAGES[3:4], 1)], [])


def test_block_that_failed_to_load_is_saved_again(cache: PrefixCache) -> None:
    cache.save(TOKENS, blocks_of(TOKENS)[:4])
    known, request = requests(cache), Asked()
    known.add(request)
    assert known.matched(request, 0) == 16
    known.allocated(request, PAGES[:8], 16)
    assert known.plan({}, lambda _: PAGES).loads == [Load("r", SPEC.root, KEYS[:4], PAGES[:8], 0)]
    request.num_computed_tokens = 8  # of 16
    assert step(known, request, 12).saves == [Save(KEYS[1], KEYS[2:5], PAGES[4:10])]


def test_roles(cache: PrefixCache) -> None:
    cache.save(TOKENS, blocks_of(TOKENS)[:4])
    reads, writes = requests(cache, saves=False), requests(cache, loads=False)
    request = Asked()
    reads.add(request)
    writes.add(request)
    assert reads.matched(request, 0) == 16
    assert writes.matched(request, 0) == 0
    assert reads.plan({"r": 40}, lambda _: PAGES) == ([], [])
    assert writes.plan({"r": 40}, lambda _: PAGES).saves[0].keys == KEYS[4:]


def test_block_is_saved_again_after_a_while(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = requests(cache)
    for name in ("a", "b"):
        known.add(Asked(name))
    assert step(known, Asked("a"), 8).saves
    assert not step(known, Asked("b"), 8).saves
    known.add(Asked("c"))
    monkeypatch.setattr(scheduling, "_SAVED_FOR_S", -1)
    assert step(known, Asked("c"), 8).saves


def test_tokens_that_have_no_key_are_not_cached(
    cache: PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    known = requests(cache)
    assert not known.add(Asked("bad", [1, -1, 2, 3]))
    assert "request bad is not cached: tokens[1]=-1" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
