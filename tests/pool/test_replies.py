"""Any reply of an index: each reader takes it, and what kvfs would not have written is nothing."""

import ipaddress
import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.core.pool.peers import is_address
from kvfs.errors import ConfigError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import Index
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Lease, PoolEntry
from tests.pool.test_index import LIFE, A, facts, said, unlinked
from tests.unit.fuzz import CPU_S, fuzzed, spoiled, spoiled_bytes

LEASE = json.dumps({"incarnation": LIFE, "address": "127.0.0.1:1", "lag_s": 0.5, "room": 7})
FACTS = facts(b"x").metadata()
DIGITS = "1" * 5000
NEST = "[" * 100_000
HUGE = b"x" * (20 << 20)
WORDS = spoiled_bytes(
    [LEASE, "", "gone", "here", A, f"@{A}", f"{LIFE} ram 1.1", "1", "0", f"{'a' * 32} {'1' * 19}"]
)
REPLIES = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.booleans() | WORDS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=20,
)


class Liar:
    """Servers that give one reply to each command."""

    place = PoolPlace.parse("redis://h/kv")

    def __init__(self, reply: Any) -> None:  # noqa: ANN401
        self.reply = reply

    async def ask(self, commands: list[Any], *, patience: float) -> list[Any]:
        assert patience > 0
        return [self.reply for _ in commands]


def told(reply: Any) -> Index:  # noqa: ANN401
    return Index(Liar(reply))  # type: ignore[arg-type]


async def ask_all(index: Index) -> None:
    """Call all that reads a reply. Raises nothing but the errors that the contract names."""
    await index.find(["@0/x"])
    await index.held(["@0/x"])
    await index.look("@0/x", "@0/x/", "x")
    await index.have_names(["@0/"])
    assert all(isinstance(name, str) for name in await index.names("@0/"))
    for lease in await index.leases([A]):
        json.dumps(lease and asdict(lease), allow_nan=False)
        if lease is not None and is_address(lease.address) and lease.address:
            ipaddress.ip_address(lease.address.rpartition(":")[0].strip("[]"))
    assert all(math.isfinite(seen) for seen in (await index.nodes()).values())
    await index.announce([said("@0/x", b"x")])
    await index.withdraw(A, ["@0/x"])
    await index.forget_owners("@0/x", [said("@0/x", b"x").owner])
    await index.unlink([unlinked("@0/x", b"x")])
    await index.switches(["x"])
    for case in (lambda: index.renew(Lease(A, LIFE, ""), "epoch", 1.0), index.expect_usable):
        with suppress(IndexDownError, ConfigError):
            await case()


@fuzzed
@given(REPLIES)
def test_any_reply_has_an_answer(reply: Any) -> None:  # noqa: ANN401
    trio.run(ask_all, told(reply))


@fuzzed
@given(st.sampled_from(sorted(FACTS)), spoiled(sorted({*FACTS.values(), "127.0.0.1:1", LIFE})))
@example("kvfs-size", DIGITS)
@example("kvfs-stored-size", DIGITS)
@example("kvfs-stored-size", "\u0663")
@example("kvfs-mtime-ns", DIGITS)
@example("kvfs-chunks", DIGITS)
@example("kvfs-model", NEST)
def test_any_fact_of_an_object_has_an_answer(name: str, value: str) -> None:
    words = {**FACTS, f"@{A}": f"{LIFE} ram 1.1", name: value}
    flat = [one.encode("utf-8", "surrogatepass") for pair in words.items() for one in pair]
    trio.run(ask_all, told(flat))


@fuzzed
@given(spoiled([LEASE]))
@example(NEST)
@example('{"a":' * 20_000)
@example(LEASE.replace("7", DIGITS))
@example(LEASE.replace("7", "1e999"))
@example(LEASE.replace("7", "NaN"))
@example(LEASE.replace("7", "-Infinity"))
@example(LEASE.replace("7", "true"))
@example(LEASE.replace(":1", f":{DIGITS}"))
@example(LEASE.replace("127.0.0.1", "[fe80::1%\\r\\nx]"))
@example(LEASE.replace("127.0.0.1", "224.0.0.1"))
def test_any_lease_has_an_answer(text: str) -> None:
    trio.run(ask_all, told(text.encode("utf-8", "surrogatepass")))


@pytest.mark.parametrize(
    "reply",
    [
        HUGE,
        LEASE.replace("127", HUGE.decode()).encode(),
        [b"%d" % number for number in range(1 << 20)],
        [b"kvfs-size", HUGE, b"kvfs-xxh3-128", HUGE, b"gone", HUGE],
        f"redis_version:{DIGITS}.1".encode(),
    ],
)
def test_huge_replies_cost_little(reply: Any) -> None:  # noqa: ANN401
    async def case() -> None:
        index = told(reply)
        began = time.process_time()
        await ask_all(index)
        assert time.process_time() - began < CPU_S
        assert await index.find(["@0/x"]) == [None]
        assert await index.leases([A]) == [None]

    trio.run(case)


@pytest.mark.parametrize("address", [f"1.2.3.4:{DIGITS}", "1.2.3.4:0", "1.2.3.4:65536", "h:1"])
def test_lease_with_a_wrong_address_has_no_address(address: str) -> None:
    assert not is_address(address)


def test_longest_lease_of_a_node_is_read() -> None:
    """A mount point has 4095 bytes at most, each of which may take six in JSON."""

    async def case() -> None:
        lease = Lease(A, LIFE, "127.0.0.1:1", host="h" * 64, mountpoint="/" + "\udcff" * 4094)
        text = json.dumps({name: one for name, one in asdict(lease).items() if name != "node"})
        assert await told(text.encode()).leases([A]) == [lease]

    trio.run(case)


def test_unknown_answer_to_an_announcement_takes_no_object_away() -> None:
    async def case() -> None:
        assert await told(b"maybe").announce([said("@0/x", b"x")]) == ["conflict"]
        assert await told(b"gone").announce([said("@0/x", b"x")]) == ["gone"]

    trio.run(case)


def test_right_replies_are_read() -> None:
    async def case() -> None:
        words = {**FACTS, f"@{A}": f"{LIFE} ram 1.1"}
        (found,) = await told([w.encode() for pair in words.items() for w in pair]).find(["@0/x"])
        assert isinstance(found, PoolEntry)
        assert await told([A.encode(), b"17"]).nodes() == {A: 17.0}
        (lease,) = await told(LEASE.encode()).leases([A])
        assert lease is not None
        assert (lease.address, lease.room) == ("127.0.0.1:1", 7)

    trio.run(case)
