"""Free space in the accounts of a mount without a kernel."""

from pathlib import Path

import pytest

from kvfs.core.capacity import free_space
from kvfs.core.namespaces.namespace import Namespace
from kvfs.settings import Settings
from tests.unit.world import world

MIB = 1 << 20


def test_what_the_bucket_lacks_is_not_available(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        space = made.ledger.namespaces.default
        before = free_space.of_namespace(made.room, space)
        made.ledger.dirty.bytes = 3 * MIB
        after = free_space.of_namespace(made.room, space)
        assert before.available - after.available == 3 * MIB
        assert before.used == after.used


def namespace(bytes_: int, **settings: str) -> Namespace:
    found = Namespace(7, Settings.parse(settings))
    found.bytes = bytes_
    return found


@pytest.mark.parametrize(
    ("giver", "taker", "more", "given"),
    [
        (namespace(100), namespace(0), 40, 60),
        (namespace(100), namespace(20), 30, 50),
        (namespace(100, weight="200"), namespace(0), 40, 20),
        (namespace(100), namespace(200), 1, 0),
        (namespace(100, quota_soft="30"), namespace(200), 1, 70),
        (namespace(100), namespace(0, quota_soft="10"), 20, 0),
        (namespace(100, quota_soft="30"), namespace(0, quota_soft="10"), 20, 70),
        (namespace(100, quota_soft="30"), namespace(0, quota_soft="10"), 50, 50),
    ],
)
def test_others_give_down_to_their_share(
    giver: Namespace, taker: Namespace, more: int, given: int
) -> None:
    assert free_space._given(giver, taker, more) == given
