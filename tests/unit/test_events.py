"""Recent events: a bounded ring of log lines and events of the tiers."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.daemon import events
from kvfs.daemon.events import Events
from kvfs.errors import DEFECT
from kvfs.tiers.calls import Health
from tests.unit.world import world

log = logging.getLogger("kvfs.test_events")
# Errors that ordinary programs cause on a healthy mount: ls and mv, for example, ask for much.
ANSWERS = {
    "lookup": "NotFoundError",
    "getxattr": "UnsupportedError",
    "removexattr": "NoAttributeError",
    "create": "ExistsError",
    "rmdir": "NotEmptyError",
    "rename": "OtherNamespaceError",
    "open": "StaleError",
    "setxattr": "NotPermittedError",
}


@pytest.fixture
def ring() -> Iterator[Events]:
    found = Events()
    yield found
    found.close()


def test_lines_of_the_log_are_events(ring: Events, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        log.debug("not this")
        log.warning("%s is full: give a larger one", "x" * 2 * events.TEXT_MOST)
        try:
            raise OSError("gone")
        except OSError:
            log.exception("it failed")
    first, second = ring.listed()
    assert (first["kind"], first["level"], first["source"]) == ("log", "WARNING", log.name)
    assert len(first["text"]) <= events.TEXT_MOST
    assert first["text"].startswith("xxx")
    assert first["text"].endswith("xxx is full: give a larger one"), "the cure stays"
    assert "x … x" in first["text"]
    assert second["text"] == "it failed: OSError('gone')"


def test_the_oldest_are_forgotten(ring: Events) -> None:
    for number in range(events.MOST + 5):
        ring.add("n", number=number)
    assert [one["number"] for one in ring.listed()] == list(range(5, events.MOST + 5))


def test_changes_of_state_are_events(ring: Events) -> None:
    health = Health("nvme tier", 0.0)
    ring.watch([health])
    health.failed(1.0, "EIO")
    health.failed(2.0, "EIO again")
    (found,) = [one for one in ring.listed() if one["kind"] == "tier"]
    assert (found["name"], found["before"], found["now"]) == ("nvme tier", "healthy", "suspect")
    assert found["why"] == "EIO"


def test_evictions_of_a_minute_are_one_event(ring: Events, tmp_path: Path) -> None:
    with world(tmp_path) as made:
        errors: Counter[tuple[str, str]] = Counter()

        async def case() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ring.sum_up, made.ledger, errors)
                await trio.testing.wait_all_tasks_blocked()
                made.ledger.counters["dropped"] += 3
                made.ledger.namespaces.default.counters["dropped_evicted"] += 3
                errors["write", "NoSpaceError"] += 2
                errors["create", "QuotaError"] += 3
                errors["read", "EIO"] += 4
                errors["open", DEFECT] += 5
                errors["open", "TooManyOpenError"] += 6
                for asked, answer in ANSWERS.items():
                    errors[asked, answer] += 100
                await trio.sleep(3 * events.PERIOD + 1)
                nursery.cancel_scope.cancel()

        trio.run(case, clock=trio.testing.MockClock(autojump_threshold=0))
    (found,) = [one for one in ring.listed() if one["kind"] == "summary"]
    assert (found["dropped"], found["refused"], found["demoted"]) == (3, 20, 0)
    assert found["dropped_in"] == {".": 3}
