"""The latest events, in a bounded ring: for `/.kvfs/events`, bundles and the web page.

Contract: each log line at INFO and above is an event of kind `log`. Other kinds have facts of their
own:

- `takeover`: `why` says how the daemon before ended.
- `tier`: a tier or the bucket changed its state.
- `summary`: the drops, by namespace, the moves and the refusals of a minute. A refusal is an error
  that means a lack or a failure of the mount, and none that only answers a program's question
  (REFUSALS).
- `rotten`: the scrubber found a wrong copy.
- `scrub`: the scrubber ended a pass.
- `pool`: a node came or went, the index or nginx ended or is back, a certificate is renewed or
  ends, or names are in conflict.

At most MOST events of TEXT_MOST characters, about 1 MB. A longer text loses its middle: the end of
a line of the log is often its cure. A new daemon begins with none; its first
event is `started` or `takeover`. Any thread may add. Not for counting: that is `status`.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import trio

from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import DEFECT, TooManyOpenError
from kvfs.rates import ERRORS
from kvfs.tiers.calls import Health, HealthState

MOST = 1000
TEXT_MOST = 1000
CUT = " … "
PERIOD = 60.0  # s between two summaries
# The kinds of errors that an operator can do something about, and those of failing system calls.
REFUSALS = {*ERRORS, *chain.from_iterable(ERRORS.values()), TooManyOpenError.__name__, DEFECT}
SUMMED = ("dropped", "demoted", "promoted", "opens_unreadable", "quarantined")

Event = dict[str, Any]


class Events(logging.Handler):
    """The events of one daemon. `close` removes it from the log's handlers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[Event] = deque(maxlen=MOST)
        logging.getLogger().addHandler(self)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        super().close()

    def listed(self) -> list[Event]:
        """Return the events, the oldest first."""
        return list(self._ring)

    def add(self, kind: str, **facts: object) -> None:
        """Add an event with these facts, plain values only."""
        self._ring.append({"time": round(time.time(), 3), "kind": kind, **facts})

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line of the log."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # the log's own handler reports it
            text = str(record.msg)
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text}: {record.exc_info[1]!r}"
        self.add("log", level=record.levelname, source=record.name, text=_within(text))

    def watch(self, healths: Iterable[Health]) -> None:
        """Make an event of each change of their states from now on."""
        for health in healths:
            health.on_change = partial(self._state, health)

    def _state(self, health: Health, before: HealthState) -> None:
        self.add("tier", name=health.name, before=before, now=health.state, why=health.why)

    async def sum_up(self, ledger: Ledger, errors: Counter[tuple[str, str]]) -> None:
        """Add the evictions and refusals of each minute, if there were any, for ever."""
        while True:
            before, spaces = self._counts(ledger, errors), self._dropped(ledger)
            await trio.sleep(PERIOD)
            now = self._counts(ledger, errors)
            found = {name: now[name] - before[name] for name in now}
            if any(found.values()):
                self.add(
                    "summary",
                    seconds=PERIOD,
                    **found,
                    dropped_in=dict(self._dropped(ledger) - spaces),
                )

    @staticmethod
    def _counts(ledger: Ledger, errors: Counter[tuple[str, str]]) -> dict[str, int]:
        found = {name: ledger.counters[name] for name in SUMMED}
        found["refused"] = sum(n for (_, kind), n in errors.items() if kind in REFUSALS)
        if ledger.tiers.bucket.mounted:
            found["spilled"] = ledger.tiers.bucket.counters["spilled"]
        return found

    @staticmethod
    def _dropped(ledger: Ledger) -> Counter[str]:
        """The objects that each namespace has lost."""
        found: Counter[str] = Counter()
        for space in ledger.namespaces:
            lost = sum(n for name, n in space.counters.items() if name.startswith("dropped_"))
            found[ledger.namespaces.name(space.ino)] += lost
        return found


def _within(text: str) -> str:
    """Return a text of at most TEXT_MOST characters, without its middle if it is longer."""
    if len(text) <= TEXT_MOST:
        return text
    half = (TEXT_MOST - len(CUT)) // 2
    return f"{text[:half]}{CUT}{text[-half:]}"
