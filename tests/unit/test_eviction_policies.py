"""The textbook policies: against plain references, libcachesim, and calls in any order."""

import bisect
import itertools
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path

import libcachesim  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.errors import ConfigError
from kvfs.eviction import NAMES, Policy, make
from kvfs.eviction.adaptive import Handover
from kvfs.eviction.histories import S3Fifo
from tests.unit import eviction_reference as reference

REFERENCES: dict[str, type[reference.Lists]] = {
    "lru": reference.Lru,
    "lfu": reference.Lfu,
    "fifo": reference.Fifo,
    "ttl": reference.Fifo,
    "arc": reference.Arc,
    "s3fifo": reference.S3FifoAdmitting,
    "sieve": reference.Sieve,
    "bimodal": reference.Bimodal,
}
THEIRS = {
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "fifo": libcachesim.FIFO,
    "arc": libcachesim.ARC,
    "s3fifo": libcachesim.S3FIFO,
    "sieve": libcachesim.Sieve,
}
SEED = 20261121


def drive(policy: Policy, trace: list[int]) -> list[bool]:
    """Which accesses were hits."""
    hits = []
    for key in trace:
        hits.append(key in policy)
        if hits[-1]:
            policy.touch(key)
            continue
        while len(policy) >= policy.capacity:
            assert policy.take(key) is not None
        policy.add(key)
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=400, deadline=None)
@given(trace=st.lists(st.integers(1, 30), max_size=300), capacity=st.integers(2, 20))
@example(trace=[1, 1, 2, 3, 4, 2, 1], capacity=2)  # B1 makes room before the victim comes into it
@example(trace=[4, 2, 4, 3, 6, 2, 3, 4, 2], capacity=3)  # T1 as large as p, and a hit in B2
def test_hits_are_those_of_the_reference(name: str, trace: list[int], capacity: int) -> None:
    assert drive(make(name, capacity), trace) == reference.run(REFERENCES[name](capacity), trace)


@given(trace=st.lists(st.integers(1, 30), max_size=300), capacity=st.integers(2, 20))
def test_s3fifo_of_the_paper(trace: list[int], capacity: int) -> None:
    assert drive(S3Fifo(capacity), trace) == reference.run(reference.S3Fifo(capacity), trace)


def zipf(seed: int) -> list[int]:
    """50,000 accesses to 5000 keys, the k-th in popularity with a share like 1/k**0.9."""
    print(f"seed {seed}")
    drawn = random.Random(seed)
    upto = list(itertools.accumulate(1 / rank**0.9 for rank in range(1, 5001)))
    return [bisect.bisect(upto, drawn.random() * upto[-1]) + 1 for _ in range(50_000)]


def mooncake(path: Path) -> list[int]:
    with lzma.open(path, "rt") as lines:
        return [block + 1 for line in lines for block in json.loads(line)["hash_ids"]]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [7, 40, 150])
@pytest.mark.parametrize("name", REFERENCES)
def test_hits_on_a_long_trace_are_those_of_the_reference(name: str, capacity: int) -> None:
    """Where histories fill, counts reach their bounds and borders move to and fro."""
    trace = [key % 300 + place // 2000 * 20 for place, key in enumerate(zipf(SEED + 1)[:8000])]
    ours = drive(make(name, capacity), [key + 1 for key in trace])
    assert ours == reference.run(REFERENCES[name](capacity), [key + 1 for key in trace])


def test_hand_of_sieve_restarts_when_its_entry_has_left() -> None:
    policy = make("sieve", 3)
    for key in (1, 2, 3):
        policy.add(key)
    policy.touch(1)
    assert policy.take() == (2, 0)  # the hand is at 3
    policy.discard(3)
    policy.add(4)
    assert policy.take() == (1, 0)


# KVFS_TRACES: a directory of Mooncake's traces, compressed with xz; the project ships none.
TRACES: dict[str, Callable[[], list[int]]] = {"zipf": lambda: zipf(SEED)}
if "KVFS_TRACES" in os.environ:
    for found in sorted(Path(os.environ["KVFS_TRACES"]).glob("*.jsonl.xz")):
        TRACES[found.name] = lambda found=found: mooncake(found)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_hit_ratios_are_those_of_libcachesim(trace: str) -> None:
    """To 0.1 point of the object hit ratio, at 1, 5, 10 and 20 % of the keys."""
    keys = TRACES[trace]()
    request = libcachesim.Request()
    request.obj_size = 1
    for name, theirs in THEIRS.items():
        for share in (0.01, 0.05, 0.1, 0.2):
            capacity = int(len(set(keys)) * share)
            cache = theirs(capacity)
            hits = 0
            for key in keys:
                request.obj_id = key
                hits += cache.get(request)
            ours = sum(drive(make(name, capacity), keys))
            assert abs(ours - hits) <= 0.001 * len(keys), (name, share, ours, hits, len(keys))


def succession(capacity: int) -> Policy:
    past = make("arc", capacity)
    for key in range(1, 6):
        past.add(key, key * 10)
    return Handover(make("s3fifo", capacity), past)


MAKERS: dict[str, Callable[[int], Policy]] = {
    **{name: lambda capacity, name=name: make(name, capacity) for name in NAMES},  # type: ignore[misc]
    **{
        f"{name}, leaf-first": lambda capacity, name=name: make(name, capacity, leaf_first=True)  # type: ignore[misc]
        for name in NAMES
    },
    "succession": succession,
}
KEYS = st.integers(1, 25)


class AnyOrder(RuleBasedStateMachine):
    """Every call at any time: what is in is in, what is out is out, and values stay with keys."""

    maker: Callable[[int], Policy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).maker(8)
        self.model = {key: key * 10 for key in self.policy}
        self.taken: list[tuple[int, int]] = []

    @rule(key=KEYS, value=st.integers(0, 99), parent=st.integers(0, 25))
    def add(self, key: int, value: int, parent: int) -> None:
        self.policy.add(key, value, parent)
        self.model[key] = value

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        assert self.policy.touch(key) == self.policy.value(key) == self.model[key]

    @rule(key=KEYS)
    def touch_any(self, key: int) -> None:
        assert self.policy.touch(key) == self.policy.value(key) == self.model.get(key)

    @rule(key=KEYS)
    def discard(self, key: int) -> None:
        assert self.policy.discard(key) == self.model.pop(key, None)

    @rule(incoming=st.none() | KEYS)
    def take(self, incoming: int | None) -> None:
        taken = self.policy.take(incoming)
        if taken is None:
            assert not self.model or self.policy_is_never()
            return
        key, value = taken
        assert self.model.pop(key) == value
        self.taken.append(taken)

    def policy_is_never(self) -> bool:
        return type(self.policy).__name__ == "Never"

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        key, value = self.taken.pop()
        if key not in self.model:
            self.policy.put_back(key, value)
            self.model[key] = value

    @rule(capacity=st.integers(1, 30))
    def resize(self, capacity: int) -> None:
        self.policy.capacity = capacity
        assert self.policy.capacity == capacity

    @invariant()
    def holds(self) -> None:
        assert len(self.policy) == len(self.model)
        assert sorted(self.policy) == sorted(self.model)
        assert [key for key in range(26) if key in self.policy] == sorted(self.model)

    def teardown(self) -> None:
        """All of it goes, each once."""
        while (taken := self.policy.take()) is not None:
            assert self.model.pop(taken[0]) == taken[1]
        assert not self.model or self.policy_is_never()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_any_order_of_calls(name: str) -> None:
    machine = type("Machine", (AnyOrder,), {"maker": staticmethod(MAKERS[name])})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
    case("runTest").runTest()


@pytest.mark.parametrize("name", [name for name in MAKERS if "never" not in name])
def test_entry_put_back_is_the_next_victim(name: str) -> None:
    policy = MAKERS[name](8)
    for key in range(11, 19):
        policy.add(key, key)
    taken = policy.take()
    assert taken is not None
    policy.put_back(*taken)
    assert next(iter(policy)) == taken[0]
    assert policy.take() == taken


def test_a_policy_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"eviction 'mru' is not known: expected adaptive, lru"):
        make("mru", 10)
    with pytest.raises(ConfigError, match="a cache of 0 entries: expected 1 at least"):
        make("lru", 0)


def test_bimodal_inserts_one_key_in_32_as_used() -> None:
    policy = make("bimodal", 100)
    for key in range(1, 65):
        policy.add(key)
    assert list(policy)[-2:] == [32, 64]
