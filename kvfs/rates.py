"""Rates and shares of opens between two looks at a status.

Contract: pure; the input is statuses as the control socket gives them, the output is rates a
second. Counters begin at 0 with each daemon, so between two daemons there is no rate (`between` is
None). A *hit* is an open to read whose bytes were in a tier of this machine. An open that needed
the bucket is none. A *miss* is a lookup of a block that is not there (`core/ledger/misses.py`), or
an open of one whose bytes no tier had. Not for asking the daemon, nor for showing
anything.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Status = Mapping[str, Any]

LOCAL = ("ram", "nvme")


class Look(NamedTuple):
    """A status, and its time (s, monotonic)."""

    at: float
    status: Status


class Opens(NamedTuple):
    """Opens to read by the place of their bytes, and misses. Counts, or counts a second."""

    hits: float = 0
    bucket: float = 0
    misses: float = 0

    @property
    def opened(self) -> float:
        return self.hits + self.bucket

    @property
    def all(self) -> float:
        return self.opened + self.misses

    @property
    def ratio(self) -> float | None:
        """Return the share of opens and misses that were hits; None if there were none."""
        return self.hits / self.all if self.all else None


class Rates(NamedTuple):
    """Rates a second: of the mount, of each tier's hits, and of each namespace's opens."""

    seconds: float
    flows: dict[str, float]
    hits: dict[str, float]
    opens: dict[str, Opens]


def _counter(*names: str) -> Callable[[Status], float]:
    return lambda status: float(sum(status["counters"].get(name, 0) for name in names))


def _bucket(*names: str) -> Callable[[Status], float]:
    return lambda status: float(sum(status["tiers"].get("s3", {}).get(name, 0) for name in names))


# The flows of a mount: counts, and bytes if the name says so.
FLOWS: dict[str, Callable[[Status], float]] = {
    "opens": lambda status: sum(opens_of(one).opened for one in status["namespaces"]),
    "misses": _counter("misses"),
    "sealed": _counter("sealed"),
    "demoted": _counter("demoted"),
    "promoted": _counter("promoted"),
    "dropped": _counter("dropped"),
    "uploads": _bucket("uploads", "copies"),
    "upload_bytes": _bucket("upload_bytes"),
    "hydrated": _bucket("downloads"),
    "hydrated_bytes": _bucket("download_bytes"),
    "spilled": _bucket("spilled"),
}


def opens_of(namespace: Status) -> Opens:
    """Return the opens of a namespace since its daemon began."""
    counters = namespace["counters"]
    return Opens(
        sum(counters.get(f"read_{name}", 0) for name in LOCAL),
        counters.get("read_s3", 0),
        counters.get("misses", 0),
    )


def between(before: Look, after: Look) -> Rates | None:
    """Return the rates; None if another daemon answered, or no time has passed."""
    seconds = after.at - before.at
    old, new = before.status, after.status
    if seconds <= 0 or _daemon(old) != _daemon(new):
        return None
    was = {one["name"]: opens_of(one) for one in old["namespaces"]}
    return Rates(
        seconds,
        {name: max(0.0, read(new) - read(old)) / seconds for name, read in FLOWS.items()},
        {
            name: max(0, tier["hits"] - old["tiers"].get(name, tier)["hits"]) / seconds
            for name, tier in new["tiers"].items()
        },
        {
            one["name"]: _since(was.get(one["name"], Opens()), opens_of(one), seconds)
            for one in new["namespaces"]
        },
    )


def _daemon(status: Status) -> tuple[int, int]:
    return status["daemon_pid"], status["takeovers"]


def _since(before: Opens, after: Opens, seconds: float) -> Opens:
    """Return the opens a second; those of a namespace made anew since begin at 0."""
    return Opens(*(max(0, new - old) / seconds for old, new in zip(before, after, strict=True)))
