"""The order in which one tier's objects of one namespace go."""

from collections.abc import Iterator

import pytest

from kvfs import eviction
from kvfs.catalog import Inode
from kvfs.core.namespaces.order import EPSILON, LATELY, Order, Victim

HOUR = 500_000


def made(ino: int, key: int = 0, parent: int = 0) -> Inode:
    return Inode(ino, 0o100644, 0, 0, key=key, parent_key=parent)


def order(policy: str = "lru") -> Order:
    return Order(eviction.make(policy, 100, leaf_first=True), evictable=policy != "never")


def taken(one: Order) -> Iterator[tuple[int, ...]]:
    while (victim := one.take()) is not None:
        yield victim.inos


def test_least_recently_used_object_goes_first() -> None:
    one = order()
    for ino in (1, 2, 3, 1):
        one.touch(made(ino))
    assert list(one) == [2, 3, 1]
    assert list(taken(one)) == [(2,), (3,), (1,)]
    assert not len(one)


def test_noted_touches_are_in_the_order() -> None:
    """Touches are only noted at first: here more of them than wait, and fewer."""
    one = order()
    for ino in (*range(1, LATELY + 10), 3):
        one.touch(made(ino))
    assert made(LATELY + 9) in one
    one.touch(made(1))
    assert len(one) == LATELY + 9
    one.touch(made(2))
    one.discard(made(LATELY))
    one.touch(made(4))
    assert list(one) == [*range(5, LATELY), *range(LATELY + 1, LATELY + 10), 3, 1, 2, 4]
    one.touch(made(5))
    assert one.take() == Victim(6, (6,))


def used(ino: int, at: int, parent: int = 0) -> Inode:
    inode = made(ino, parent=parent)
    inode.atime_ns = at
    return inode


def stored(one: Order, *times: int) -> None:
    """Objects whose inode numbers are the times of their last use are written in this order."""
    for at in times:
        one.touch(used(at, at))
        one.note_stored(used(at, at))


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "arc", "sieve", "lfu"])
def test_object_copied_later_goes_by_its_last_use(policy: str) -> None:
    one = order(policy)
    stored(one, 10, 20, 30, 40)
    for at in (15, 16, 35, 50):
        one.copy(used(at, at))
    assert len(one) == 8
    assert {*one} == {10, 15, 16, 20, 30, 35, 40, 50}
    found: list[int] = []
    while (victim := one.take(lambda ino: ino)) is not None:
        found += victim.inos
    assert found == [10, 15, 16, 20, 30, 35, 40, 50]
    assert not len(one)


def test_late_object_that_is_used_or_leaves_is_late_no_more() -> None:
    one = order()
    stored(one, 10, 20)
    for at in (5, 6, 7):
        one.copy(used(at, at))
    one.touch(used(6, 30))
    one.discard(used(7, 7))
    assert used(7, 7) not in one
    assert used(5, 5) in one
    assert list(taken(one)) == [(5,), (10,), (20,), (6,)]


def test_late_object_joins_its_group() -> None:
    one = order()
    stored(one, 10)
    first, second = made(1, key=77), made(2, key=77)
    one.copy(first)
    one.copy(second)
    assert one.members(77) == (1, 2)
    one.discard(first)
    assert list(taken(one)) == [(10,), (2,)]


def test_block_of_a_prompt_is_never_late() -> None:
    one = order()
    stored(one, 10, 20)
    one.copy(used(5, 5, parent=10))
    assert one.parent(5) == 10
    assert list(taken(one)) == [(20,), (5,), (10,)]


def test_a_group_is_taken_together_and_counts_once() -> None:
    one = order()
    for inode in (made(1, 77), made(2, 88), made(3, 77), made(3, 77)):
        one.touch(inode)
    assert len(one) == 2
    assert one.members(77) == (1, 3)
    assert one.take() == Victim(88, (2,))
    assert one.take() == Victim(77, (1, 3))


def test_a_group_shrinks_as_its_members_leave() -> None:
    one = order()
    for ino in (1, 2, 3):
        one.touch(made(ino, 77))
    one.discard(made(2, 77))
    assert made(2, 77) not in one
    assert made(1, 77) in one
    assert one.take() == Victim(77, (1, 3))
    one.touch(made(1, 77))
    one.discard(made(1, 77))
    assert one.take() is None


def test_the_past_goes_first_and_its_oldest_hour_before_all() -> None:
    one = order()
    one.touch(made(9))
    for ino, hour in ((1, HOUR), (2, HOUR + 1), (3, HOUR), (4, HOUR + 1)):
        one.add_past(ino, hour)
    assert len(one) == 5
    assert list(one) == [1, 3, 2, 4, 9]
    assert one.take() == Victim(0, (1,))
    assert list(one) == [3, 2, 4, 9], "an hour that is used up in part is listed alike"
    assert list(taken(one)) == [(3,), (2,), (4,), (9,)]


def test_past_victim_put_back_is_the_next_victim() -> None:
    one = order()
    for ino in (1, 2, 3):
        one.add_past(ino, HOUR)
    victim = one.take()
    assert victim is not None
    one.put_back(victim)
    assert list(taken(one)) == [(1,), (2,), (3,)]


def test_a_group_that_cannot_go_is_the_next_again() -> None:
    one = order()
    for inode in (made(1, 77), made(2, 77), made(3)):
        one.touch(inode)
    victim = one.take()
    assert victim is not None
    one.put_back(victim)
    assert made(2, 77) in one
    assert list(taken(one)) == [(1, 2), (3,)]


def test_order_that_is_not_evictable_gives_no_victim() -> None:
    one = order("never")
    one.touch(made(1))
    one.add_past(2, HOUR)
    assert one.take() is None
    assert sorted(one) == [1, 2]


def test_a_block_goes_before_the_block_that_it_continues() -> None:
    one = order()
    for inode in (made(1, 11), made(2, 22, 11), made(3, 33, 22)):
        one.touch(inode)
    assert one.parent(33) == 22
    assert one.parent(11) == 0
    assert list(taken(one)) == [(3,), (2,), (1,)]


def test_no_policy_is_told_of_less_room_than_it_needs() -> None:
    one = order()
    one.give_room_for(0)
    assert one.policy.capacity == EPSILON
    one.give_room_for(1000)
    assert one.policy.capacity == 1000


# Another policy


def change(one: Order, policy: str) -> None:
    one.change(eviction.make(policy, 100, leaf_first=True), evictable=policy != "never")


def test_members_from_before_a_change_of_policy_go_first() -> None:
    one = order()
    one.add_past(9, HOUR)
    for ino in (1, 2, 3):
        one.touch(made(ino))
    change(one, "fifo")
    one.touch(made(4))
    one.touch(made(2))
    assert len(one) == 5
    assert list(one) == [9, 1, 3, 4, 2]
    assert list(taken(one)) == [(9,), (1,), (3,), (4,), (2,)]
    assert one._before == []


def test_object_discarded_after_a_change_of_policy_is_no_member() -> None:
    """Or the movers would be given what is gone, for ever."""
    one = order()
    for inode in (made(1), made(2, 77), made(3, 77)):
        one.touch(inode)
    change(one, "arc")
    one.discard(made(1))
    one.discard(made(2, 77))
    assert list(one) == [3]
    one.touch(made(1))
    assert list(taken(one)) == [(3,), (1,)]


@pytest.mark.parametrize("between", [[], ["never"], ["never", "lru", "never"], ["sieve", "arc"]])
def test_policies_may_change_again_and_again(between: list[str]) -> None:
    one = order()
    for ino in (1, 2, 3):
        one.touch(made(ino))
    for policy in between:
        change(one, policy)
        one.touch(made(10 + len(one)))
    change(one, "lru")
    one.touch(made(1))
    assert list(one) == [2, 3, *range(13, 13 + len(between)), 1]
    assert [ino for (ino,) in taken(one)] == [2, 3, *range(13, 13 + len(between)), 1]


def test_change_of_policy_changes_evictability() -> None:
    one = order("never")
    for ino in (1, 2):
        one.touch(made(ino))
    change(one, "lru")
    assert one.take() == Victim(1, (1,))
    change(one, "never")
    assert one.take() is None
    assert list(one) == [2]


def test_victim_put_back_after_a_change_of_policy_is_next() -> None:
    one = order()
    for ino in (1, 2):
        one.touch(made(ino))
    change(one, "fifo")
    one.touch(made(3))
    victim = one.take()
    assert victim == Victim(1, (1,))
    one.put_back(victim)
    assert list(taken(one)) == [(1,), (2,), (3,)]


def test_prefixes_are_remembered_over_a_change() -> None:
    one = order()
    for inode in (made(1, 11), made(2, 22, 11), made(3, 33, 22)):
        one.touch(inode)
    change(one, "fifo")
    assert one.parent(33) == 22
    for inode in (made(1, 11), made(2, 22, 11), made(3, 33, 22)):
        one.touch(inode)
    assert list(taken(one)) == [(3,), (2,), (1,)]
