"""The past values of a mount, for charts: rings of samples in memory, gone with their process.

Contract: the history has a sample each STEP seconds for an hour, and the mean of each minute for a
day. An unknown value is None; all are None while the daemon does not answer. Memory is bounded: a
ring has COLUMNS series at most, with 8 bytes a value (6 MB in all). A series beyond these gets no
ring. A series without a value for the length of the ring loses its place to another. Thread-safe.
Not for asking the daemon.
"""

import math
import threading
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from kvfs.rates import Look, Rates, between

STEP = 5.0  # s
MINUTE = 12  # steps
LENGTHS = {"hour": 720, "day": 1440}
STEPS = {"hour": STEP, "day": STEP * MINUTE}
COLUMNS = 350
SPACE = "namespace "  # the names of namespaces' series begin so, then have the kind and the name
KINDS = ("bytes", "opens", "ratio")


class Ring:
    """The last `length` samples of a number of series."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._count = 0
        self._times = array("d", [math.nan]) * length
        self._columns: dict[str, array[float]] = {}
        self._seen: dict[str, int] = {}

    def put(self, at: float, values: Mapping[str, float]) -> None:
        """Add one sample; `at`: s since 1970."""
        place = self._count % self._length
        self._times[place] = at
        for name, column in self._columns.items():
            column[place] = values.get(name, math.nan)
        for name, value in values.items():
            if name not in self._columns and len(self._columns) < COLUMNS:
                self._columns[name] = array("d", [math.nan]) * self._length
                self._columns[name][place] = value
            if name in self._columns:
                self._seen[name] = self._count
        self._count += 1
        old = [name for name, last in self._seen.items() if self._count - last > self._length]
        for name in old:
            del self._columns[name], self._seen[name]

    def since(self, after: float, names: Iterator[str] | None = None) -> dict[str, Any]:
        """Return the `times` after `after`, and the series' values then; `names` selects series."""
        first = max(0, self._count - self._length)
        places = [
            number % self._length
            for number in range(first, self._count)
            if self._times[number % self._length] > after
        ]
        wanted = self._columns if names is None else [n for n in names if n in self._columns]
        return {
            "times": [round(self._times[place], 1) for place in places],
            "series": {
                name: [_known(self._columns[name][place]) for place in places] for name in wanted
            },
        }

    def names(self) -> list[str]:
        return list(self._columns)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.6g}")


class History:
    """The samples of one mount."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings = {span: Ring(length) for span, length in LENGTHS.items()}
        self._minute: list[Mapping[str, float]] = []
        self.look: Look | None = None  # the last one; None while there is no answer
        self.rates: Rates | None = None

    def add(self, now: float, look: Look | None) -> None:
        """Add a look at the daemon, each STEP seconds; `now`: s since 1970."""
        rates = between(self.look, look) if self.look and look else None
        values = {} if look is None else dict(_values(look.status, rates))
        with self._lock:
            self.look, self.rates = look, rates
            self._rings["hour"].put(now, values)
            self._minute.append(values)
            if len(self._minute) == MINUTE:
                self._rings["day"].put(now, _mean(self._minute))
                self._minute = []

    def since(self, span: str, after: float, namespace: str | None = None) -> dict[str, Any]:
        """Return the values of a span, of the mount or of a namespace. KeyError: no such span."""
        with self._lock:
            ring = self._rings[span]
            if namespace is None:
                names = (name for name in ring.names() if not name.startswith(SPACE))
            else:
                names = (f"{SPACE}{kind} {namespace}" for kind in KINDS)
            found = ring.since(after, names)
        return {"span": span, "step_s": STEPS[span], **found}

    def last(self) -> tuple[Look | None, Rates | None]:
        """Return the last look, and the rates between it and the one before."""
        with self._lock:
            return self.look, self.rates


def _mean(samples: list[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for values in samples:
        for name, value in values.items():
            sums.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sums.items()}


def _values(status: Mapping[str, Any], rates: Rates | None) -> Iterator[tuple[str, float]]:
    """Yield the values by series; those of the mount come first, so that they have their place."""
    for name, tier in status["tiers"].items():
        yield f"used {name}", tier["used_bytes"]
        if rates is not None:
            yield f"hits {name}", rates.hits.get(name, 0.0)
    if "s3" in status["tiers"]:
        yield "dirty", status["tiers"]["s3"]["dirty_bytes"]
    if status.get("pool"):
        yield "lag", status["pool"]["lag_s"]
        if rates is not None:
            yield "hits pool", rates.hits.get("pool", 0.0)
    yield "objects", status["objects"]
    yield "jobs", status["jobs"]
    if rates is not None:
        yield from rates.flows.items()
        everybody = [*map(sum, zip(*rates.opens.values(), strict=True))]
        if sum(everybody):
            yield "ratio", everybody[0] / sum(everybody)
    for one in sorted(status["namespaces"], key=lambda one: one["bytes"], reverse=True):
        yield f"{SPACE}bytes {one['name']}", one["bytes"]
        opens = rates.opens.get(one["name"]) if rates else None
        if opens is not None:
            yield f"{SPACE}opens {one['name']}", opens.opened
            if opens.ratio is not None:
                yield f"{SPACE}ratio {one['name']}", opens.ratio
