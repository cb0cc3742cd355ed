"""The order in which downloads get their turns, with requests that come and go in any order."""

import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs.catalog import Inode
from kvfs.core.fetching.budget import Budget, FetchTurn
from kvfs.core.fetching.fetch import Fetch

MOST, SLOTS = 100, 4

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 150)),
        st.tuples(st.just("ahead"), st.integers(1, 150)),
        st.tuples(st.just("hurry"), st.integers(0, 30)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=40,
)


class _Crowd:
    """Those who want a turn, and those who have theirs."""

    def __init__(self) -> None:
        self.budget = Budget(MOST, SLOTS)
        self.waiting: list[FetchTurn] = []
        self.running: list[FetchTurn] = []

    def come(self, cost: int, *, urgent: bool) -> None:
        turn = FetchTurn(cost, urgent)
        self.waiting.append(turn)
        self.budget.ask(turn)
        self.look()

    def look(self) -> None:
        """Move the turns that have come to `running`."""
        self.running += [turn for turn in self.waiting if turn.come.is_set()]
        self.waiting = [turn for turn in self.waiting if not turn.come.is_set()]

    def act(self, what: str, number: int) -> None:
        if what in {"open", "ahead"}:
            self.come(number, urgent=what == "open")
        elif what == "hurry":
            among = [turn for turn in (*self.waiting, *self.running) if not turn.urgent]
            if among:
                self.budget.hurry(among[number % len(among)])
        elif what == "leave" and self.running:
            self.budget.leave(self.running.pop(number % len(self.running)))
        elif what == "cancel" and self.waiting:
            self.budget.leave(self.waiting.pop(number % len(self.waiting)))
        self.look()

    def empty(self) -> None:
        while self.waiting or self.running:
            self.act("leave", 0)
            self.check()

    def check(self) -> None:
        budget = self.budget
        assert budget.bytes == sum(turn.counted for turn in self.running) <= MOST
        assert budget.count == len(self.running) <= SLOTS
        ahead = [turn for turn in self.running if not turn.urgent]
        assert budget.ahead_bytes == sum(turn.counted for turn in ahead) <= MOST // 2
        assert budget.ahead_count == len(ahead) <= SLOTS // 2
        assert budget.waiting == len(self.waiting)
        for turn in self.running:
            assert turn.counted == turn.cost or turn.cost > MOST // 2
        opens = list(budget._opens)
        assert set(opens) == {turn for turn in self.waiting if turn.urgent}
        if opens:  # the first of them has a reason to wait
            assert len(self.running) == SLOTS or budget.bytes + min(opens[0].cost, MOST) > MOST
        elif self.waiting:
            assert self.running


@given(ACTS)
def test_opens_come_before_prefetches_within_the_budget(
    acts: list[tuple[str, int]],
) -> None:
    crowd = _Crowd()
    for what, number in acts:
        opens = {turn for turn in crowd.waiting if turn.urgent}
        before = list(crowd.running)
        crowd.act(what, number)
        crowd.check()
        if opens & set(crowd.waiting):
            came = [turn for turn in crowd.running if turn not in before]
            assert all(turn.urgent for turn in came), "it went before an open"
    crowd.empty()
    budget = crowd.budget
    assert (budget.bytes, budget.ahead_bytes, budget.ahead_count) == (0, 0, 0)


def test_an_open_begins_beside_all_that_is_fetched_ahead() -> None:
    crowd = _Crowd()
    for _ in range(10):
        crowd.come(1000, urgent=False)
    assert len(crowd.running) == 1, "each of them is half of the budget"
    crowd.come(50, urgent=True)
    assert crowd.running[-1].urgent
    crowd.empty()


def test_fetch_that_an_open_waits_for_moves_up() -> None:
    crowd = _Crowd()
    for _ in range(5):
        crowd.come(10, urgent=False)
    last = crowd.waiting[-1]
    crowd.budget.hurry(last)
    crowd.look()
    assert last in crowd.running
    crowd.empty()


def test_streams_leave_room_for_other_fetches() -> None:
    """A stream may take minutes."""

    async def case() -> None:
        budget = Budget(256 << 20, SLOTS)
        streams = [Fetch(Inode(ino, 0o100644, 0, 0), 1 << 40, streamed=True) for ino in (1, 2, 3)]
        other = Fetch(Inode(4, 0o100644, 0, 0), 128 << 20)
        for one in (*streams, other):
            budget.ask(one.turn)
        assert other.turn.come.is_set()
        assert {one.cost for one in streams} == {1 << 40}

    trio.run(case)
