"""How much of a prefix is cached: the question's bytes, and the answer to it."""

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs import matching, prefix
from kvfs.core.lending.matching import Matching
from kvfs.errors import InvalidError, StaleError
from kvfs.matching import MatchAnswer, pack_request, unpack_answer, unpack_request
from tests.unit.world import World, world

ROOT = prefix.root_key("a fingerprint")
KEYS = prefix.block_keys(ROOT, range(64), 1)
RAM, NVME = matching.RAM, matching.NVME


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=9),
    st.lists(st.from_regex(r"[0-9A-Za-z_-]{1,32}", fullmatch=True), max_size=3),
    st.booleans(),
)
def test_a_request_is_read_back(keys: list[bytes], shards: list[str], details: bool) -> None:  # noqa: FBT001
    packed = pack_request(ROOT, keys, shards, details=details)
    assert len(packed) == matching.request_size(packed[:16])
    expected = (int(details), tuple(shards) or ("",), ROOT, b"".join(keys))
    assert unpack_request(packed) == expected
    assert unpack_request(packed).blocks == len(keys)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_request_or_refused(data: bytes, magic: bool) -> None:  # noqa: FBT001
    try:
        found = unpack_request(matching.MAGIC + data if magic else data)
    except InvalidError:
        return
    assert found.blocks * 16 == len(found.keys)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "request of 0 bytes, expected 16 at least"),
        (b"KVM2" + bytes(12), "begins with b'KVM2', expected b'KVM1'"),
        (struct.pack("<4sIII", b"KVM1", 2, 0, 0) + ROOT, "flags 0x2, expected 0 or 1"),
        (struct.pack("<4sIII", b"KVM1", 0, 65537, 0), "65537 keys and 0 bytes of shards, at most"),
        (pack_request(ROOT, KEYS[:1])[:-1], "request of 47 bytes, expected 48"),
        (struct.pack("<4sIII", b"KVM1", 0, 0, 1) + b"/" + ROOT, "shards: shard='/'"),
        (struct.pack("<4sIII", b"KVM1", 0, 0, 2) + b"a," + ROOT, "one of them has no name"),
        (
            struct.pack("<4sIII", b"KVM1", 0, 65536, 33) + b"a" + b",a" * 16 + bytes(16 * 65537),
            "17 shards of 65536 blocks, at most",
        ),
    ],
)
def test_a_bad_request_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        unpack_request(data)


def test_an_answer_is_read_back() -> None:
    for answer in (MatchAnswer(3, 1, 2, 3), MatchAnswer(2, 1, 2, 3, b"\1\3", (4, 1 << 40))):
        assert unpack_answer(matching.pack_answer(answer)) == answer
    for bad in (b"", b"KVM1", matching.pack_answer(MatchAnswer(3, 1, 2, 3)) + b"x"):
        with pytest.raises(ValueError, match="answer"):
            unpack_answer(bad)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as found:
        found.namespace("ns", prefix="on")
        found.mkdir(b"ns/" + ROOT.hex().encode())
        for shard in ("", "0", "1"):  # they begin in RAM
            found.placement.sizes.learn(found.find(b"ns").ino, ("kvfs-prefix", shard), 4096)
        yield found


async def write(made: World, keys: list[bytes], *shards: str, size: int = 100) -> None:
    for parent, key in pairwise([ROOT, *keys]):
        for shard in shards or ("",):
            await made.make_file(b"ns/" + prefix.path(parent, key, shard).encode(), bytes(size))


async def ask(
    made: World, keys: list[bytes], *shards: str, parent: bytes = ROOT, details: bool = False
) -> MatchAnswer:
    request = unpack_request(pack_request(parent, keys, shards, details=details))
    return await Matching(made.tree).answer(made.find(b"ns").ino, request)


def inode(made: World, at: int) -> int:
    before = KEYS[at - 1] if at else ROOT
    return made.at(b"ns/" + prefix.path(before, KEYS[at]).encode()).ino


def test_blocks_before_the_first_gap_count(made: World) -> None:
    async def case() -> None:
        await write(made, KEYS[:9])
        assert await ask(made, KEYS) == (9, 900, 0, 0, b"", ())
        assert await ask(made, KEYS[:4]) == (4, 400, 0, 0, b"", ())
        assert await ask(made, KEYS[4:], parent=KEYS[3]) == (5, 500, 0, 0, b"", ())
        assert (await ask(made, [])).blocks == 0
        assert (await ask(made, KEYS[1:])).blocks == 0, "of another parent"
        assert (await ask(made, KEYS[20:], parent=KEYS[19])).blocks == 0
        assert (await ask(made, prefix.block_keys(b"\1" * 16, [1], 1), parent=b"\1" * 16))[0] == 0
        made.tree.unlink(made.at(b"ns/" + KEYS[2].hex().encode()).ino, KEYS[3].hex().encode())
        assert (await ask(made, KEYS)).blocks == 3, "though what follows is not cleared yet"
        await made.close_prefixes()
        assert (await ask(made, KEYS)).blocks == 3

    trio.run(case)


def test_answer_has_the_tier_of_each_block(made: World) -> None:
    async def case() -> None:
        await write(made, KEYS[:4])
        await made.demote(inode(made, 1))
        await made.demote(inode(made, 2))
        found = made.ledger.table.inode(inode(made, 2))
        assert found is not None
        made.ledger.records.remove_copy(found, made.fast)
        answer = await ask(made, KEYS, details=True)
        where = bytes((RAM, RAM | NVME, NVME, RAM))
        assert answer == (4, 300, 100, 0, where, (100, 100, 100, 100))

    trio.run(case)


def test_each_shard_has_to_be_there(made: World) -> None:
    async def case() -> None:
        await write(made, KEYS[:6], "0")
        for parent, key in pairwise([ROOT, *KEYS[:4]]):
            if key != KEYS[2]:
                path = b"ns/" + prefix.path(parent, key, "1").encode()
                await made.make_file(path, bytes(10))
        assert await ask(made, KEYS, "0") == (6, 600, 0, 0, b"", ())
        assert await ask(made, KEYS, "1") == (2, 20, 0, 0, b"", ())
        assert await ask(made, KEYS, "0", "1", details=True) == (
            *(2, 220, 0, 0, bytes((RAM, RAM)), (110, 110)),
        )
        assert (await ask(made, KEYS)).blocks == 0, "those without a shard"

    trio.run(case)


def test_unsealed_block_does_not_count(made: World) -> None:
    async def case() -> None:
        await write(made, KEYS[:1])
        above = made.at(b"ns/" + KEYS[0].hex().encode()).ino
        held = await made.create(KEYS[1].hex().encode(), bytes(5), above)
        assert (await ask(made, KEYS)).blocks == 1
        made.objects.sealing.flush(held, writable=True)
        assert await ask(made, KEYS, details=True) == (
            *(2, 105, 0, 0, bytes((RAM, RAM)), (100, 5)),
        )
        await made.objects.sealing.release(held, writable=True)
        assert (await ask(made, KEYS)).blocks == 2

    trio.run(case)


def test_before_the_census_has_counted_names_are_looked_up(made: World) -> None:
    async def before() -> None:
        await write(made, KEYS)
        for at in range(len(KEYS)):
            await made.demote(inode(made, at))

    async def after() -> None:
        expected = (64, 0, 6400, 0, bytes([NVME] * 64), (100,) * 64)
        assert await ask(made, KEYS, details=True) == expected
        await made.census()
        assert await ask(made, KEYS, details=True) == expected

    trio.run(before)
    made.restart(lose_ram=True)
    trio.run(after)


def test_a_namespace_that_is_none(made: World) -> None:
    async def case() -> None:
        with pytest.raises(StaleError, match="no namespace with prefix=on"):
            await Matching(made.tree).answer(1, unpack_request(pack_request(ROOT, [])))

    trio.run(case)
