"""File handle numbers, and what the session file is told of them."""

from pathlib import Path
from typing import NamedTuple

import pytest

from kvfs.catalog import Inode
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import TooManyOpenError
from kvfs.fuse.handles import Handles
from kvfs.fuse.passthrough import Slot, SlotState
from kvfs.tiers import NvmeTier


class Told(NamedTuple):
    handle: int
    state: SlotState


class Memory:
    """A table that remembers what it was told."""

    def __init__(self) -> None:
        self.bound: list[Slot] = []
        self.states: list[Told] = []

    def bind(self, slot: Slot, *, noflush: bool) -> None:
        assert noflush != slot.writable
        self.bound.append(slot)

    def set_state(self, handle: int, state: SlotState) -> None:
        self.states.append(Told(handle, state))


@pytest.fixture
def held(tmp_path: Path) -> OpenObject:
    tier = NvmeTier(tmp_path, 1 << 20)
    tier.close()
    return OpenObject(Inode(77, 0o100644, 0, 0), tier, -1, writable=False, backing_id=9)


def release(handles: Handles, handle: int) -> None:
    assert handles.begin_release(handle) is not None
    handles.end_release(handle)


def test_the_smallest_free_number_is_given_out(held: OpenObject) -> None:
    handles = Handles(100, Memory())
    numbers = [handles.add(held, writable=False, request=n) for n in range(4)]
    assert numbers == [1, 2, 3, 4]
    for number in (3, 1):
        release(handles, number)
    assert len(handles) == 2
    assert [handles.add(held, writable=True, request=9) for _ in range(3)] == [1, 3, 5]


def test_a_number_is_free_when_its_release_was_answered(held: OpenObject) -> None:
    """Until the answer, a waiting request must not meet another object under the same number."""
    table = Memory()
    handles = Handles(100, table)
    handle = handles.add(held, writable=True, request=5)
    assert table.bound == [Slot(handle, 77, 5, 9, SlotState.BOUND, True, held.tier.number)]  # noqa: FBT003
    found = handles.begin_release(handle)
    assert found is not None
    assert found.writable
    assert handles.add(held, writable=False, request=6) != handle
    handles.end_release(handle)
    assert table.states == [(handle, SlotState.RELEASING), (handle, SlotState.FREE)]
    assert handles.add(held, writable=False, request=7) == handle


def test_a_release_that_comes_again_finds_nothing(held: OpenObject) -> None:
    handles = Handles(100, Memory())
    handle = handles.add(held, writable=False, request=1)
    release(handles, handle)
    assert handles.begin_release(handle) is None
    with pytest.raises(KeyError):
        handles[handle]


def test_more_handles_than_slots_are_refused(held: OpenObject) -> None:
    handles = Handles(4, Memory())
    for request in range(3):
        handles.add(held, writable=False, request=request)
    with pytest.raises(TooManyOpenError, match="all 3 file handles are in use"):
        handles.add(held, writable=False, request=3)
    release(handles, 2)
    assert handles.add(held, writable=False, request=4) == 2


def slot(handle: int, state: SlotState, *, request: int = 0) -> Slot:
    return Slot(handle, 77, request, 9, state, writable=False, tier=2)


def test_a_takeover_keeps_handles_and_finishes_releases(held: OpenObject) -> None:
    table = Memory()
    handles = Handles(100, table)
    slots = [
        slot(2, SlotState.OPEN),
        slot(3, SlotState.RELEASING),
        slot(5, SlotState.BOUND, request=8),
    ]
    ending = handles.adopt(slots, 6, lambda _: held)
    assert [one.held for one in ending] == [held]
    assert handles[2].held is held
    assert handles.claim(7) is None
    assert handles.claim(8) == 5
    assert handles.claim(8) is None, "a request is answered once"
    # Numbers that a RELEASE which comes again may name are not given out before it has come.
    assert handles.add(held, writable=False, request=20) == 6
    assert handles.begin_release(2) is not None  # under way while claims end
    assert handles.end_claims() == []
    assert table.states[-1] == (3, SlotState.FREE)
    assert [handles.add(held, writable=False, request=21) for _ in range(3)] == [1, 3, 4]
    handles.end_release(2)
    assert handles.add(held, writable=False, request=22) == 2


def test_unanswered_handle_is_released_after_a_takeover(held: OpenObject) -> None:
    """BOUND: the kernel has no answer. ANSWERING: it may have one, and will release the handle."""
    handles = Handles(100, Memory())
    handles.adopt(
        [slot(1, SlotState.BOUND, request=1), slot(2, SlotState.ANSWERING, request=2)],
        3,
        lambda _: held,
    )
    assert handles.end_claims() == [1]
    assert handles.claim(2) is None


def test_a_handle_of_an_inode_that_is_gone_is_none(held: OpenObject) -> None:
    handles = Handles(100, Memory())
    assert (
        handles.adopt([slot(1, SlotState.RELEASING), slot(2, SlotState.OPEN)], 3, lambda _: None)
        == []
    )
    assert len(handles) == 0
    assert handles.begin_release(2) is None
    assert handles.end_claims() == []
    assert handles.add(held, writable=False, request=0) == 1


def test_a_number_that_was_freed_but_perhaps_not_answered_is_not_given_out(
    held: OpenObject,
) -> None:
    """Its RELEASE may come again, and must not meet who was opened after the takeover."""
    handles = Handles(100, Memory())
    handles.adopt([], 2, lambda _: held)
    assert handles.add(held, writable=False, request=1) == 2
    assert handles.begin_release(1) is None
    assert handles.end_claims() == []
    assert handles.add(held, writable=False, request=2) == 1
