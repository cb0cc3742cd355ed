"""Least recently used, against a simple model, and what it costs."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.eviction import LeastRecentlyUsed

KEYS = st.integers(1, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), KEYS),
        st.tuples(st.just("discard"), KEYS),
        st.tuples(st.just("take"), st.just(0)),
    )
)


@given(STEPS)
def test_young_keys_go_in_the_order_of_their_use(steps: list[tuple[str, int]]) -> None:
    lru, model = LeastRecentlyUsed(), list[int]()
    for what, key in steps:
        if what == "take":
            assert lru.take_oldest() == (model.pop(0) if model else None)
        else:
            model = [k for k in model if k != key] + [key] * (what == "touch")
            getattr(lru, what)(key)
        assert list(lru) == model
        assert len(lru) == len(model)


@given(st.dictionaries(KEYS, st.integers(0, 3)), STEPS)
def test_keys_of_the_past_go_first_by_hour(
    past: dict[int, int], steps: list[tuple[str, int]]
) -> None:
    """One that is touched and discarded may still come from the past: it has no owner then."""
    lru, young = LeastRecentlyUsed(), list[int]()
    for key, hour in past.items():
        lru.add_past(key, hour)
    untouched, ownerless = dict(past), set[int]()
    for what, key in steps:
        if what != "take":
            young = [k for k in young if k != key] + [key] * (what == "touch")
            if what == "touch" and untouched.pop(key, None) is not None:
                ownerless.add(key)
            getattr(lru, what)(key)
            continue
        taken = lru.take_oldest()
        if taken in untouched:
            assert untouched.pop(taken) == min(past[k] for k in (taken, *untouched))
        elif taken in ownerless and taken not in young:
            ownerless.remove(taken)
        else:
            assert not untouched, "the young are younger than all of the past"
            assert taken == (young.pop(0) if young else None)
    assert set(lru) >= set(young) | set(untouched)


def test_a_young_key_has_no_past() -> None:
    lru = LeastRecentlyUsed()
    lru.touch(1)
    lru.add_past(1, 5)
    lru.add_past(2, 5)
    assert [lru.take_oldest() for _ in range(3)] == [2, 1, None]


def test_everything_is_taken_in_the_end() -> None:
    lru = LeastRecentlyUsed()
    for key in range(1, 100):
        lru.add_past(key, key % 7)
    for key in range(50, 150):
        lru.touch(key)
    taken = []
    while (oldest := lru.take_oldest()) is not None:
        taken.append(oldest)
    assert sorted(taken) == list(range(1, 150))
    assert taken[49:] == list(range(50, 150))
    assert len(lru) == 0


@pytest.mark.parametrize(("past", "most"), [(True, 10), (False, 140)])
def test_what_a_key_costs(most: int, *, past: bool) -> None:
    count = 100_000
    keys = list(range(1 << 40, (1 << 40) + count))
    lru = LeastRecentlyUsed()
    tracemalloc.start()
    try:
        for key in keys:
            if past:
                lru.add_past(key, key % 24)
            else:
                lru.touch(key)
        bytes_each = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert bytes_each <= most
