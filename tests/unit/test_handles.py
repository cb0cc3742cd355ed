"""Handle numbers: small, reused, bounded."""

import pytest

from kvfs.core.residency import OpenObject
from kvfs.errors import TooManyOpenError
from kvfs.fuse.handles import Handles
from kvfs.tiers import Tier
from tests.unit.test_inode import file


@pytest.fixture
def held() -> OpenObject:
    return OpenObject(file(), Tier.__new__(Tier), -1, writable=False)


def test_numbers_begin_at_one_and_the_lowest_is_used_again(held: OpenObject) -> None:
    handles = Handles(100)
    assert [handles.add(held, writable=False) for _ in range(4)] == [1, 2, 3, 4]
    for slot in (3, 1):
        handles.remove(slot)
    assert len(handles) == 2
    assert [handles.add(held, writable=True) for _ in range(3)] == [1, 3, 5]


def test_a_number_says_how_it_was_opened(held: OpenObject) -> None:
    handles = Handles(100)
    reading, writing = handles.add(held, writable=False), handles.add(held, writable=True)
    assert handles[reading] == (held, False)
    assert handles[writing] == (held, True)
    assert handles.remove(writing).writable
    with pytest.raises(KeyError):
        handles[writing]


def test_there_are_no_more_than_slots(held: OpenObject) -> None:
    handles = Handles(4)
    for _ in range(3):
        handles.add(held, writable=False)
    with pytest.raises(TooManyOpenError, match="all 3 file handles are in use"):
        handles.add(held, writable=False)
    handles.remove(2)
    assert handles.add(held, writable=False) == 2
