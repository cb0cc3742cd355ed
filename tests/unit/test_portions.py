"""One user's part of what all share: there is always some of it for the next one."""

import random
from collections import Counter

import pytest

from kvfs.errors import TooManyOpenError, UserLimitError
from kvfs.fairness.portions import Portions


def all_of(portions: Portions, uid: int, amount: int = 1) -> int:
    """How much one user gets who takes what can be had."""
    had = 0
    while True:
        try:
            portions.charge(uid, amount)
        except (UserLimitError, TooManyOpenError):
            return had
        had += amount


def test_each_user_gets_half_of_the_rest() -> None:
    portions = Portions("things", 1024)
    assert [all_of(portions, uid) for uid in range(4)] == [512, 256, 128, 64]
    with pytest.raises(UserLimitError) as refused:
        portions.charge(0)
    assert str(refused.value) == (
        "uid 0 has 512 of 1024 things: one user may have half of what the others leave"
    )


def test_users_without_end_exhaust_the_mount_and_hear_that() -> None:
    portions = Portions("things", 1024)
    found = [all_of(portions, uid) for uid in range(12)]
    assert found == [512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 0, 0]
    with pytest.raises(TooManyOpenError, match="1023 of 1024 things are taken by all users"):
        portions.charge(99)


def test_returned_amount_can_be_charged_again() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice, portions, mine = random.Random(seed), Portions("bytes", 10_000), Counter[int]()
    for _ in range(20_000):
        uid, amount = dice.randrange(5), dice.randrange(1, 300)
        if dice.random() < 0.5:
            before = portions.total
            try:
                portions.charge(uid, amount)
                mine[uid] += amount
            except (UserLimitError, TooManyOpenError):
                assert portions.total == before
        elif mine[uid]:
            given = dice.randrange(1, mine[uid] + 1)
            portions.add(uid, -given)
            mine[uid] -= given
        assert portions.total == sum(mine.values()) == sum(portions.by_uid.values())
        assert portions.total < portions.most
        assert max(mine.values(), default=0) <= portions.most // 2
    for uid, amount in mine.items():
        portions.add(uid, -amount)
    assert (portions.total, +portions.by_uid) == (0, Counter())
