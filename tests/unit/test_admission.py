"""Admission to NVMe: what a budget lets through, and that every answer is counted."""

import random
from collections.abc import Iterator

import pytest

from kvfs.fairness.admission import BURST, DAY, GHOSTS, Admission

MIDNIGHT = 20_000.0 * DAY
NOON = MIDNIGHT + DAY / 2
BUDGET = 24_000  # bytes a day, so 1000 an hour


def test_without_a_budget_everything_is_admitted_and_counted() -> None:
    admission = Admission(0)
    assert all(admission.decide(key, 1 << 40, NOON, touched=False) for key in range(100))
    assert admission.counters == {"admitted": 100}
    assert admission.spent == (20_000, 100 << 40)


def test_objects_without_later_use_are_admitted_at_a_steady_pace() -> None:
    admission = Admission(BUDGET)
    keys = iter(range(10**9))
    admitted = []
    for minute in range(24 * 60):
        now = MIDNIGHT + minute * 60
        admitted += [now for _ in range(10) if admission.decide(next(keys), 10, now, touched=False)]
        steady = (now - MIDNIGHT + BURST) / DAY * BUDGET
        assert admission.spent[1] <= min(BUDGET, steady + 10)
    assert admission.spent[1] > BUDGET - 10
    assert admission.counters.total() == 24 * 60 * 10
    assert admission.counters["admitted"] == len(admitted)
    assert admission.counters["refused_adaptive"] > 0


def test_touched_objects_are_admitted_up_to_the_budget_of_the_day() -> None:
    admission = Admission(BUDGET)
    answers = [admission.decide(key, 1000, MIDNIGHT, touched=True) for key in range(30)]
    assert answers == [True] * 24 + [False] * 6
    assert admission.counters == {"admitted": 24, "refused_budget": 6}
    assert admission.decide(99, 1000, MIDNIGHT + DAY, touched=False)


def test_refused_object_is_admitted_when_it_comes_again() -> None:
    admission = Admission(BUDGET)
    assert admission.decide(1, 1001, MIDNIGHT, touched=False)
    assert not admission.decide(2, 10, MIDNIGHT, touched=False)
    assert admission.decide(2, 10, MIDNIGHT, touched=False)
    assert not admission.decide(2, 10, MIDNIGHT, touched=False)  # once for each time it came
    assert admission.counters == {"admitted": 2, "refused_adaptive": 2}


def test_the_ghosts_of_those_refused_last_are_kept() -> None:
    admission = Admission(BUDGET)
    assert admission.decide(-1, 1001, MIDNIGHT, touched=False)
    for key in range(GHOSTS + 1):
        assert not admission.decide(key, 1, MIDNIGHT, touched=False)
    assert not admission.decide(0, 1, MIDNIGHT, touched=False)
    assert admission.decide(GHOSTS, 1, MIDNIGHT, touched=False)


def test_a_ghost_that_comes_again_is_remembered_longer() -> None:
    admission = Admission(BUDGET, spent=(20_000, BUDGET))
    for key in [*range(GHOSTS), 0, GHOSTS]:
        assert not admission.decide(key, 1, MIDNIGHT, touched=False)
    admission.budget = 2 * BUDGET
    assert not admission.decide(1, 1, MIDNIGHT, touched=False)
    assert admission.decide(0, 1, MIDNIGHT, touched=False)


def test_obliged_object_is_admitted_beyond_the_budget() -> None:
    admission = Admission(10)
    assert admission.decide(1, 100, NOON, touched=False, obliged=True)
    assert not admission.decide(2, 1, NOON, touched=True)
    assert admission.counters == {"obliged": 1, "refused_budget": 1}
    assert admission.spent == (20_000, 100)


def test_a_day_goes_on_after_a_restart_and_begins_at_midnight() -> None:
    admission = Admission(BUDGET, spent=(20_000, BUDGET))
    assert not admission.decide(1, 1, NOON, touched=True)
    assert not admission.decide(1, 1, NOON - DAY, touched=True)  # the clock was set back
    assert admission.decide(1, 1, MIDNIGHT + DAY, touched=True)
    assert admission.spent == (20_001, 1)


def test_a_budget_may_change_within_the_day() -> None:
    admission = Admission(BUDGET, spent=(20_000, BUDGET))
    admission.budget = 10 * BUDGET
    assert admission.decide(1, 1, NOON, touched=True)
    admission.budget = 1
    assert not admission.decide(2, 1, NOON, touched=True)
    admission.budget = 0
    assert admission.decide(2, 1, NOON, touched=False)


def zipf(rng: random.Random, keys: int) -> Iterator[int]:
    weights = [1 / (rank + 1) for rank in range(keys)]
    while True:
        yield from rng.choices(range(keys), weights, k=1000)


@pytest.mark.parametrize("seed", range(3))
def test_tight_budget_is_spent_on_objects_that_come_again(seed: int) -> None:
    """Half of the objects come once, half again and again: these get most of the budget."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    again = zipf(rng, 2000)
    admission = Admission(1000)
    admitted = {"once": 0, "again": 0}
    for number in range(10_000):
        now = MIDNIGHT + number * DAY / 10_000
        kind = rng.choice(["once", "again"])
        key = next(again) if kind == "again" else 10_000 + number
        admitted[kind] += admission.decide(key, 1, now, touched=False)
    assert sum(admitted.values()) <= 1000
    assert admitted["again"] > 3 * admitted["once"]
