"""The hot objects among many, held against exact counts."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.fairness.hot_objects import Hot, HotObjects

# A key is touched; -1 halves, and -2 - key takes the key out.
EVENTS = st.lists(st.integers(0, 12) | st.just(-1) | st.integers(-14, -2), max_size=200)


def touched(hot: HotObjects, keys: Iterable[int]) -> HotObjects:
    for key in keys:
        hot.touch(key)
    return hot


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 10))
def test_counts_are_never_too_low_and_their_excess_is_bounded(
    keys: list[int], counters: int
) -> None:
    exact = Counter(keys)
    found = touched(HotObjects(counters), keys).top(counters)
    for one in found:
        assert one.opens - len(keys) / counters <= exact[one.key] <= one.opens
    there = {one.key for one in found}
    assert all(key in there for key, opens in exact.items() if opens > len(keys) / counters)
    assert len(found) == min(counters, len(exact))


@given(EVENTS, st.integers(1, 5))
def test_halving_and_deaths_keep_the_bounds(events: list[int], counters: int) -> None:
    hot = HotObjects(counters)
    exact: dict[int, float] = {}
    opens = 0.0
    for event in events:
        if event >= 0:
            hot.touch(event)
            exact[event] = exact.get(event, 0) + 1
            opens += 1
        elif event == -1:
            hot.decay()
            exact = {key: count / 2 for key, count in exact.items()}
            opens /= 2
        else:
            hot.discard(-2 - event)
            exact.pop(-2 - event, None)
        for one in hot.top(counters):
            assert exact.get(one.key, 0) < one.opens + 1
            assert one.opens - opens / counters - 1 <= exact.get(one.key, 0)


def test_within_the_counters_everything_is_exact() -> None:
    hot = touched(HotObjects(4), [1, 2, 2, 3, 3, 3])
    assert hot.top(2) == [Hot(3, 3), Hot(2, 2)]
    assert len(hot.top(10)) == 3


def test_hot_objects_cool_down() -> None:
    hot = touched(HotObjects(), [1] * 100)
    for _ in range(7):
        assert hot.top(1)
        hot.decay()
    assert hot.top(1) == []


def test_decay_halves_the_error_of_counts() -> None:
    hot = touched(HotObjects(2), [1] * 8 + [2] * 9 + [3])
    assert hot.top(2) == [Hot(2, 9), Hot(3, 9)]
    hot.decay()
    hot.discard(2)
    hot.touch(4)  # it may have been opened as often as what went for 3
    assert hot.top(2) == [Hot(4, 5), Hot(3, 4)]


def test_an_object_that_is_gone_is_not_shown() -> None:
    hot = touched(HotObjects(2), [1, 1, 2])
    hot.discard(1)
    hot.discard(99)
    assert hot.top(2) == [Hot(2, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_the_hottest_of_many_are_found(seed: int) -> None:
    """Of 100,000 objects that are opened by Zipf's law, all of the first ten."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(100_000)]
    keys = rng.choices(range(100_000), weights, k=200_000)
    hot = touched(HotObjects(), keys)
    exact = Counter(keys)
    for one, (key, opens) in zip(hot.top(10), exact.most_common(10), strict=True):
        assert one.key == key
        assert opens <= one.opens <= opens * 1.2


def test_zero_counters_are_refused() -> None:
    with pytest.raises(ValueError, match="0 counters: expected 1 or more"):
        HotObjects(0)
