"""Leaf-first eviction: a block does not outlive its prefix, with any policy inside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.eviction import NAMES, LeafFirst, make

INNER = [name for name in NAMES if name not in {"adaptive", "never"}]


def leaf_first(name: str, capacity: int) -> LeafFirst:
    policy = make(name, capacity, leaf_first=True)
    assert isinstance(policy, LeafFirst)
    return policy


def request(policy: LeafFirst, blocks: list[int]) -> int:
    """How many of the blocks were hits, in one piece from the first on."""
    found, previous = 0, 0
    for place, key in enumerate(blocks):
        if key in policy:
            policy.touch(key)
            found += place == found
        else:
            while len(policy) >= policy.capacity:
                policy.take(key)
            policy.add(key, parent=previous)
        previous = key
    return found


@pytest.mark.parametrize("name", INNER)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40),
    capacity=st.integers(6, 20),
)
def test_no_victim_has_children(name: str, prompts: list[list[int]], capacity: int) -> None:
    """With prompts that fit, of a tree of blocks, each victim is a leaf, so prompts stay whole."""
    policy = leaf_first(name, capacity)
    parents: dict[int, int] = {}
    for prompt in prompts:
        previous = 0
        for depth in range(len(prompt)):
            key = int("1" + "".join(map(str, prompt[: depth + 1])))  # its path from the root
            parents[key] = previous
            if key in policy:
                policy.touch(key)
            else:
                while len(policy) >= capacity:
                    before = set(policy)
                    taken = policy.take(key)
                    assert taken is not None
                    assert not [other for other in before if parents[other] == taken[0]]
                policy.add(key, parent=previous)
            previous = key


@pytest.mark.parametrize("name", INNER)
@given(trace=st.lists(st.integers(1, 20), max_size=200))
def test_without_parents_it_is_the_policy_inside(name: str, trace: list[int]) -> None:
    wrapped, plain = make(name, 7, leaf_first=True), make(name, 7)
    for key in trace:
        assert (key in wrapped) == (key in plain)
        for policy in (wrapped, plain):
            if key in policy:
                policy.touch(key)
            else:
                while len(policy) >= 7:
                    policy.take(key)
                policy.add(key)


@pytest.mark.parametrize("name", INNER)
def test_a_prompt_larger_than_the_cache(name: str) -> None:
    """Of 100 blocks 90 fit. Belady has 89 of them each time after the first."""
    policy = leaf_first(name, 90)
    prompt = list(range(1, 101))
    found = [request(policy, prompt) for _ in range(20)]
    print(found)
    assert found[0] == 0
    assert sum(found) >= 0.9 * 19 * 89


def test_the_deepest_goes_first_and_then_its_parent() -> None:
    policy = leaf_first("lru", 10)
    request(policy, [1, 2, 3])
    request(policy, [7])
    assert [policy.take() for _ in range(4)] == [(3, 0), (2, 0), (1, 0), (7, 0)]


def test_used_parked_block_returns_to_the_order() -> None:
    policy = leaf_first("lru", 10)
    request(policy, [1, 2])
    request(policy, [8, 9])
    assert policy.take() == (2, 0)  # 1 was parked, and is ready now
    policy.touch(1)
    assert policy.take() == (9, 0)


def test_a_key_put_back_has_its_parent_again() -> None:
    policy = leaf_first("lru", 10)
    request(policy, [1, 2])
    taken = policy.take()
    assert taken == (2, 0)
    policy.put_back(*taken)
    assert policy.parent(2) == 1
    assert [policy.take(), policy.take()] == [(2, 0), (1, 0)]


def test_an_orphan_goes_first_until_its_parent_is_back() -> None:
    policy = leaf_first("lru", 10)
    for key in (1, 2, 3):
        policy.add(key)
    assert policy.take() == (1, 0)
    policy.add(11, parent=1)
    policy.add(12, parent=1)
    assert policy.take() == (12, 0)
    policy.add(1)
    assert policy.take() == (2, 0)


def test_an_orphan_that_left_is_forgotten() -> None:
    policy = leaf_first("lru", 10)
    for key in (1, 2):
        policy.add(key)
    assert policy.take() == (1, 0)
    policy.add(11, parent=1)
    assert policy.discard(11) == 0
    assert policy.take() == (2, 0)


def test_a_parent_of_its_own_has_none() -> None:
    policy = leaf_first("lru", 10)
    policy.add(1, parent=1)
    policy.add(2)
    assert policy.take() == (1, 0)


@pytest.mark.parametrize("name", INNER)
def test_parents_that_are_wrong_do_no_harm(name: str) -> None:
    """A circle, a parent of its own, parents that never come: all of it goes, each once."""
    policy = leaf_first(name, 10)
    for key, parent in ((1, 2), (2, 3), (3, 1), (4, 4), (5, 99), (6, 99)):
        policy.add(key, key * 10, parent)
    gone = [policy.take() for _ in range(6)]
    assert sorted(pair for pair in gone if pair) == [(key, key * 10) for key in range(1, 7)]
    assert policy.take() is None
    assert len(policy) == 0
