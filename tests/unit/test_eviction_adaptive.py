"""The policy that follows the best, its samples, and what it says of other sizes."""

import heapq
import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.eviction import Accesses, LeafFirst, Policy, PolicySelector, Seeds, WhatIf, make
from kvfs.eviction.adaptive import Adaptive, Handover
from kvfs.eviction.ghosts import KINDS, Sample
from kvfs.eviction.what_if import FEWEST, TIMES

Requests = list[list[int]]
DOCUMENTS: Requests = [[number * 1000 + block for block in range(1, 101)] for number in range(10)]


def hits(policy: Policy, requests: Requests) -> int:
    """Blocks found in one piece from the first on; what is missing is stored."""
    found = 0
    for blocks in requests:
        contiguous, previous = True, 0
        for key in blocks:
            if key in policy:
                policy.touch(key)
                found += contiguous
            else:
                contiguous = False
                while len(policy) >= policy.capacity:
                    policy.take(key)
                policy.add(key, parent=previous)
            previous = key
    return found


def belady(requests: Requests, capacity: int) -> int:
    """Count the same if the block used furthest in the future goes, even one that just came."""
    flat = [key for blocks in requests for key in blocks]
    upcoming, seen = [0] * len(flat), dict[int, int]()
    for place in reversed(range(len(flat))):
        upcoming[place] = seen.get(flat[place], len(flat) + 1)
        seen[flat[place]] = place
    here, heap, place, found = dict[int, int](), list[tuple[int, int]](), 0, 0
    for blocks in requests:
        contiguous = True
        for key in blocks:
            contiguous = contiguous and key in here
            found += contiguous
            here[key] = upcoming[place]
            heapq.heappush(heap, (-upcoming[place], key))
            while len(here) > capacity:
                use, victim = heapq.heappop(heap)
                if here.get(victim) == -use:
                    del here[victim]
            place += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "capacity"),
    [([DOCUMENTS[turn % 10] for turn in range(600)], 800), ([DOCUMENTS[0]] * 60, 90)],
    ids=["ten long documents in turn", "one prompt larger than the cache"],
)
def test_nine_tenths_of_belady(requests: Requests, capacity: int) -> None:
    assert hits(make("adaptive", capacity), requests) >= 0.9 * belady(requests, capacity)


def test_documents_in_turn_make_bimodal_the_winner() -> None:
    policy = Adaptive(80)
    documents = [[key for key in blocks if key % 1000 <= 10] for blocks in DOCUMENTS]
    hits(policy, documents * 30)
    assert policy.choice.winner == "bimodal"
    assert policy.choice.hit_ratios()["bimodal"] > 0.6
    assert policy._past is None, "nothing of the old order is left"
    assert not isinstance(policy.inner, Handover)
    assert policy.choice.hit_ratios()["lru"] == 0


@pytest.mark.slow
def test_adaptive_switches_to_the_better_policy() -> None:
    """Loops that only BIP keeps a part of, then a working set that moves, where BIP sticks."""
    print("seed 7")
    drawn = random.Random(7)
    policy = Adaptive(80)
    documents = [[key for key in blocks if key % 1000 <= 10] for blocks in DOCUMENTS]
    hits(policy, documents * 30)
    assert policy.choice.winner == "bimodal"
    moving = [[10_000 + place + drawn.randrange(60)] for place in range(6000)]
    hits(policy, moving)
    assert policy.choice.winner != "bimodal"
    alone = make("bimodal", 80, leaf_first=True)
    hits(alone, moving)
    later = [[20_000 + place + drawn.randrange(60)] for place in range(6000)]
    assert hits(policy, later) > hits(alone, later)


@given(
    capacity=st.integers(1, 10**7),
    resized=st.integers(1, 10**7),
    most=st.sampled_from([64, 1024, 2048]),
)
def test_a_sample_fits_its_cache(capacity: int, resized: int, most: int) -> None:
    sample = Sample(capacity, most)
    assert capacity >> sample.shift <= most
    assert sample.shift == 0 or capacity >> sample.shift >= most // 4
    shift = sample.shift
    assert sample.resize(resized) == (sample.shift != shift)
    assert resized >> sample.shift <= most
    assert sample.shift == 0 or resized >> sample.shift >= most // 4


def test_a_sample_is_a_share_of_the_keys() -> None:
    """Of keys in a row and of drawn ones alike; 5 standard deviations of chance."""
    print("seed 3")
    drawn = random.Random(3)
    for keys in (range(1, 160_001), [drawn.getrandbits(62) + 1 for _ in range(160_000)]):
        sample = Sample(16 * 1024, 1024)
        assert sample.shift == 4
        assert abs(sum(key in sample for key in keys) - 10_000) < 5 * 10_000**0.5


def test_the_ancestor_in_a_sample() -> None:
    sample = Sample(1 << 20, 1 << 16)  # 1 in 16
    chain = list(range(1, 400))
    first = next(key for key in chain if key in sample)
    assert sample.ancestor(first, lambda key: key - 1) == first
    assert sample.ancestor(first - 1, lambda key: key - 1) == 0
    second = next(key for key in chain[first:] if key in sample)
    assert sample.ancestor(second - 1, lambda key: key - 1) == first
    outside = next(key for key in chain if key not in sample)
    assert sample.ancestor(outside, lambda _: outside) == 0  # a circle


def zipf(keys: int, count: int, seed: int) -> list[int]:
    print(f"seed {seed}")
    weights = [1 / rank for rank in range(1, keys + 1)]
    return random.Random(seed).choices(range(1, keys + 1), weights, k=count)


def ratio(policy: Policy, trace: list[int]) -> float:
    return hits(policy, [[key] for key in trace]) / len(trace)


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "within"), [(1 << 20, 0.005), (64, 0.04)])
def test_would_be_answers_are_those_of_caches_of_that_size(entries: int, within: float) -> None:
    """From all keys, and from a sample of 1 in 16; the trace is the same all over."""
    trace = zipf(4000, 30_000, 5)
    would_be = WhatIf(1000, entries=entries)
    assert would_be.answers() == {}
    for key in trace:
        would_be.see(key, 0, lambda _: 0)
    answers = would_be.answers()
    assert list(answers) == [0.5, 1.0, 2.0, 4.0]
    for times, answer in answers.items():
        # The first accesses miss at any size: the window has forgotten nearly all of them.
        full = make("lru", int(1000 * times))
        ratio(full, trace[:15_000])
        assert abs(answer - ratio(full, trace[15_000:])) <= within, (times, answer)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_a_block_that_all_prompts_begin_with_does_not_decide(sampled: bool) -> None:  # noqa: FBT001
    """It is a tenth of all accesses, in a sample of 1 in 16 or not."""
    sample = Sample(1000, 64)
    hot = next(key for key in range(10**6, 10**7) if (key in sample) is sampled)
    trace = [key if place % 10 else hot for place, key in enumerate(zipf(4000, 30_000, 10))]
    would_be = WhatIf(1000, entries=64)
    for key in trace:
        would_be.see(key, 0, lambda _: 0)
    for times, answer in would_be.answers().items():
        full = make("lru", int(1000 * times))
        ratio(full, trace[:15_000])
        assert abs(answer - ratio(full, trace[15_000:])) <= 0.05, (times, answer)


def test_would_be_answers_go_on_with_another_policy_and_size() -> None:
    trace = zipf(400, 4000, 6)
    would_be = WhatIf(100, "s3fifo")
    for key in trace:
        would_be.see(key, 0, lambda _: 0)
    before = would_be.answers()
    would_be.follow("arc")
    assert would_be.answers() == before
    would_be.capacity = 200
    assert would_be.capacity == 200
    for key in trace:
        would_be.see(key, 0, lambda _: 0)
    after = would_be.answers()
    assert after[0.5] < after[1.0] < after[2.0]
    assert abs(after[0.5] - before[1.0]) < 0.05


@pytest.mark.parametrize("stored", [300, 3000, 20_000])
def test_a_sample_of_a_few_accesses_says_nothing(stored: int) -> None:
    """Of each of these a sample of 1 in 256 has less than a hundred."""
    would_be = WhatIf(130_797)
    assert would_be.sample.shift == 8
    for key in range(stored):
        would_be.see(key, 0, lambda _: 0)
        assert would_be.answers() == {}


@pytest.mark.parametrize("first", [1, 1 << 20, 1 << 40])
def test_what_if_of_unread_keys_has_no_hits(first: int) -> None:
    would_be = WhatIf(130_797)
    keys = count(first)
    while not (answers := would_be.answers()):
        would_be.see(next(keys), 0, lambda _: 0)
    assert next(keys) - first == FEWEST << would_be.sample.shift
    assert max(answers.values()) <= 0.1, "two standard deviations"


@pytest.mark.parametrize("capacity", [1, 10, 100, 512])
def test_of_all_keys_a_few_accesses_say_nothing_either(capacity: int) -> None:
    """A small cache keeps its answer, although its counts decay."""
    would_be = WhatIf(capacity)
    for seen in range(10_000):
        assert bool(would_be.answers()) == (seen >= FEWEST)
        would_be.see(seen % 2, 0, no_parent)
    assert would_be.answers()[4.0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", ["lru", "fifo", "ttl", "sieve", "lfu", "arc", "s3fifo", "bimodal"])
def test_what_if_follows_each_policy(kind: str) -> None:
    would_be = WhatIf(100)
    would_be.follow(kind)
    full, hit = make(kind, 100), 0
    trace = zipf(300, 20_000, 13)
    for key in trace:
        would_be.see(key, 0, no_parent)
        if full.touch(key) is not None:
            hit += 1
            continue
        while len(full) >= full.capacity:
            full.take(key)
        full.add(key)
    assert abs(would_be.answers()[1.0] - hit / len(trace)) <= 0.06


def test_change_of_the_sample_keeps_the_counts() -> None:
    policy, would_be = Adaptive(1000, entries=64), WhatIf(1000, entries=64)
    keys = zipf(3000, 20_000, 11)
    hits(policy, [[key] for key in keys])
    for key in keys:
        would_be.see(key, 0, lambda _: 0)
    scores, answers = policy.choice.hit_ratios(), would_be.hit_ratios()
    shift = policy.choice.sample.shift
    policy.capacity = would_be.capacity = 8000
    assert policy.choice.sample.shift == shift + 3
    assert policy.choice.hit_ratios() == pytest.approx(scores)
    assert would_be.hit_ratios() == pytest.approx(answers)


def test_change_of_the_capacity_keeps_fitting_ghosts() -> None:
    policy = Adaptive(1000, entries=64)
    hits(policy, [[key] for key in zipf(3000, 5000, 8)])
    for capacity in (10, 100_000, 1000):
        policy.capacity = capacity
        for ghost in policy.choice.ghosts.values():
            assert len(ghost.policy) <= max(1, capacity >> policy.choice.sample.shift)
            assert all(key in policy.choice.sample for key in ghost.policy)
        while len(policy) > capacity:
            assert policy.take() is not None
        hits(policy, [[key] for key in zipf(3000, 1000, 9)])
    assert isinstance(policy, LeafFirst)


def no_parent(_: int) -> int:
    return 0


def test_what_if_counts_opens_and_lookups_and_the_choice_opens_and_stores() -> None:
    would_be, choice = WhatIf(500), PolicySelector(1000)  # neither forgets so few accesses
    accesses = Accesses(would_be, choice)
    for key in range(1, 11):
        accesses.looked_up(key)
        accesses.stored(key, 0, no_parent)
        accesses.opened(key, 0, no_parent)
    accesses.looked_up(99)
    accesses.opened_again(7)
    accesses.count()
    assert would_be.accesses == 28
    assert would_be.hit_ratios() == dict.fromkeys(TIMES, pytest.approx(17 / 28))
    assert choice.accesses == 27
    assert choice.hit_ratios() == pytest.approx(dict.fromkeys(KINDS, 17 / 27))


@pytest.mark.slow
def test_what_if_of_the_present_size_is_the_measured_ratio() -> None:
    """An engine looks a block up, and stores it if it is absent: once, or as parts of a store."""
    would_be, full = WhatIf(1000), make("lru", 1000)
    accesses, hit = Accesses(would_be), 0
    trace = zipf(4000, 30_000, 12)
    for place, key in enumerate(trace):
        if full.touch(key) is not None:
            hit += place >= 15_000
            accesses.opened(key, 0, no_parent)
            continue
        accesses.looked_up(key)
        while len(full) >= full.capacity:
            full.take()
        full.add(key)
        accesses.stored(key, 0, no_parent)
    accesses.count()
    assert abs(would_be.answers()[1.0] - hit / 15_000) <= 0.04


def test_what_if_of_a_cache_in_which_copies_of_other_nodes_go_first() -> None:
    """Each second open is of a key that another node has, and its copy goes before the next one."""
    would_be = WhatIf(20)
    accesses = Accesses(would_be)
    for key in range(1, 16):
        accesses.stored(key, 0, no_parent)
    for number in range(500):
        accesses.opened(1 + number % 15, 0, no_parent)
        accesses.opened_guest(100 + number % 40, 0, no_parent, hit=False)
    accesses.count()
    answers = would_be.answers()
    assert answers[1.0] == answers[2.0] == pytest.approx(0.5, abs=0.01)
    assert answers[4.0] > 0.9


def test_copy_of_another_node_that_is_opened_again_is_like_the_others() -> None:
    would_be = WhatIf(2)
    accesses = Accesses(would_be)
    accesses.stored(1, 0, no_parent)
    accesses.opened_guest(2, 0, no_parent, hit=False)
    accesses.opened(2, 0, no_parent)
    accesses.stored(3, 0, no_parent)
    ghost = would_be.ghosts[1.0]
    assert set(ghost.policy) == {2, 3}
    accesses.opened_guest(4, 0, no_parent, hit=False)
    accesses.stored(4, 0, no_parent)
    accesses.stored(5, 0, no_parent)
    assert set(ghost.policy) == {4, 5}, "new bytes are of this node"


def test_copy_that_came_before_its_first_open_is_a_hit_at_any_size() -> None:
    would_be, choice = WhatIf(500), PolicySelector(500)
    accesses = Accesses(would_be, choice)
    for key in range(1, 11):
        accesses.opened_guest(key, 0, no_parent, hit=key > 4)
    accesses.count()
    assert would_be.hit_ratios() == dict.fromkeys(TIMES, pytest.approx(0.6))
    assert choice.hit_ratios() == dict.fromkeys(KINDS, pytest.approx(0.6))


def test_ghosts_forget_copies_of_other_nodes_with_their_keys() -> None:
    would_be = WhatIf(20)
    accesses = Accesses(would_be)
    for key in range(1, 11):
        accesses.opened_guest(key, 0, no_parent, hit=False)
    would_be.forget(1)
    would_be.follow("arc")
    would_be.capacity = 4
    for ghost in would_be.ghosts.values():
        assert set(ghost.guests) == set(ghost.policy)
    assert set(would_be.ghosts[1.0].policy) == {7, 8, 9, 10}


def test_a_key_that_is_forgotten_is_a_miss_at_any_size() -> None:
    would_be = WhatIf(100)
    accesses = Accesses(would_be)
    accesses.stored(5, 0, no_parent)
    would_be.forget(5)
    accesses.looked_up(5)
    accesses.count()
    assert would_be.hit_ratios() == dict.fromkeys(TIMES, 0.0)


@pytest.mark.parametrize("objects", [100, 5000, 200_000])
def test_seeds_are_the_sample_of_a_cache_that_is_full(objects: int) -> None:
    would_be, seeds = WhatIf(objects), Seeds()
    for key in range(1, objects + 1):
        seeds.add(key * 7919, 0)
    list(seeds.sow(would_be, no_parent))
    sampled = [key for key in range(1, objects + 1) if key * 7919 in would_be.sample]
    assert len(sampled) >= min(objects, 64)
    present = sum(key * 7919 in would_be.ghosts[4.0].policy for key in sampled)
    assert present == len(sampled)
    assert not list(seeds.sow(would_be, no_parent)), "they are sown once"
