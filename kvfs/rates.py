"""Rates and shares of opens between two looks at a status.

Contract: pure; the input is statuses as the control socket gives them, the output is rates a
second. Counters begin at 0 with each daemon, so between two daemons there is no rate (`between` is
None). A *hit* is an open to read whose bytes were in a tier of this machine. An open that needed
the bucket or another node of the pool is none. A *miss* is a lookup of a block that is not there
(`core/ledger/misses.py`), or an open of one whose bytes no tier had. Not for asking the daemon, nor
for showing anything.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from kvfs.units import parse_size

Status = Mapping[str, Any]

_Counts = TypeVar("_Counts", "Opens", "Bandwidth")

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
    nodes: float = 0  # other nodes of the pool

    @property
    def opened(self) -> float:
        return self.hits + self.bucket + self.nodes

    @property
    def all(self) -> float:
        return self.opened + self.misses

    @property
    def ratio(self) -> float | None:
        """Return the share of opens and misses that were hits; None if there were none."""
        return self.hits / self.all if self.all else None

    def with_other_nodes(self, hit_ratio: float) -> float:
        """Return a hit ratio plus the share of opens that other nodes of the pool would serve.

        Assumes that they serve the same share of the opens that are no hits, at any hit ratio.
        """
        others = self.all - self.hits
        return hit_ratio + (1 - hit_ratio) * self.nodes / others if others else hit_ratio


class Bandwidth(NamedTuple):
    """Bytes of the files that readers opened, and bytes that writers wrote. Sums, or a second.

    The kernel moves the bytes, so kvfs knows the size of an opened file, and not which bytes a
    reader reads.
    """

    opened: float = 0
    written: float = 0


class Rates(NamedTuple):
    """Rates a second: of the mount, of the hits of each tier and the pool, of each namespace."""

    seconds: float
    flows: dict[str, float]
    hits: dict[str, float]
    opens: dict[str, Opens]
    bandwidth: dict[str, Bandwidth]
    # s: bounds that half and 99 % of the opens kept; empty without opens.
    open_times: tuple[float, ...] = ()


# Errors that a client sees, by the classes of `kvfs.errors`. An absent name is none: it is a miss.
ERRORS = {
    "ENOSPC": ("NoSpaceError",),
    "EDQUOT": ("QuotaError", "UserLimitError"),
    "EIO": ("TierError", "CatalogError"),
}
QUANTILES = (0.5, 0.99)


def errors_of(status: Status) -> dict[str, int]:
    """Return the number of errors since the daemon began, by errno."""
    found = status["errors"].values()
    return {
        name: sum(by_class.get(one, 0) for by_class in found for one in classes)
        for name, classes in ERRORS.items()
    }


def _counter(*names: str) -> Callable[[Status], float]:
    return lambda status: float(sum(status["counters"].get(name, 0) for name in names))


def _bucket(*names: str) -> Callable[[Status], float]:
    return lambda status: float(sum(status["tiers"].get("s3", {}).get(name, 0) for name in names))


def _pool(name: str) -> Callable[[Status], float]:
    def read(status: Status) -> float:
        pool = status.get("pool")  # None without one; an earlier daemon lacks some counters
        return float(pool["counters"].get(name, 0)) if pool else 0.0

    return read


# The flows of a mount: counts, and bytes if the name says so.
FLOWS: dict[str, Callable[[Status], float]] = {
    "opens": lambda status: sum(opens_of(one).opened for one in status["namespaces"]),
    "misses": _counter("misses"),
    "opened_bytes": lambda status: sum(bandwidth_of(one).opened for one in status["namespaces"]),
    "written_bytes": lambda status: sum(bandwidth_of(one).written for one in status["namespaces"]),
    "sealed": _counter("sealed"),
    "demoted": _counter("demoted"),
    "promoted": _counter("promoted"),
    "dropped": _counter("dropped"),
    "uploads": _bucket("uploads", "copies"),
    "upload_bytes": _bucket("upload_bytes"),
    "hydrated": _bucket("downloads"),
    "hydrated_bytes": _bucket("download_bytes"),
    "spilled": _bucket("spilled"),
    "found": _pool("found"),
    "fetched": _pool("fetched"),
    "fetched_bytes": _pool("fetched_bytes"),
    "served": _pool("served"),
    "served_bytes": _pool("served_bytes"),
}


def opens_of(namespace: Status) -> Opens:
    """Return the opens of a namespace since its daemon began."""
    counters = namespace["counters"]
    return Opens(
        sum(counters.get(f"read_{name}", 0) for name in LOCAL),
        counters.get("read_s3", 0),
        counters.get("misses", 0),
        counters.get("read_pool", 0),
    )


def hits_of(status: Status) -> dict[str, int]:
    """Return the opens to read by the place of their bytes, since the daemon began.

    The places are the tiers, and `pool` for other nodes if the mount has a pool.
    """
    found = {name: tier["hits"] for name, tier in status["tiers"].items()}
    pool = status.get("pool")
    if pool and "hits" in pool:  # an earlier daemon has none
        found["pool"] = pool["hits"]
    return found


def bandwidth_of(namespace: Status) -> Bandwidth:
    """Return the bytes of a namespace since its daemon began."""
    counters = namespace["counters"]
    return Bandwidth(counters.get("read_bytes", 0), counters.get("written_bytes", 0))


def quota_share(namespace: Status) -> float | None:
    """Return the used share of `quota_hard` or `quota_objects`, the larger one; None: no quota."""
    settings = namespace["settings"]
    quotas = parse_size(settings["quota_hard"]), int(settings["quota_objects"])
    used = namespace["bytes"] + staging_of(namespace), namespace["objects"]
    shares = [found / quota for found, quota in zip(used, quotas, strict=True) if quota]
    return max(shares, default=None)


def staging_of(namespace: Status) -> int:
    """Return the bytes of files that are being written; an earlier daemon gives none."""
    found: int = namespace.get("staging_bytes", 0)
    return found


def reserved_of(tier: Status) -> int:
    """Return the reserved bytes of a tier, as far as it has room for them.

    The daemon guesses the sizes of files that are being written, and their sum may be too large.
    """
    found: int = min(tier["reserved_bytes"], tier["capacity_bytes"] - tier["used_bytes"])
    return max(0, found)


def taken_share(tier: Status) -> float:
    """Return the share of a tier that sealed objects and writers take; 0 without a capacity."""
    capacity = tier["capacity_bytes"]
    return min(1.0, (tier["used_bytes"] + reserved_of(tier)) / capacity) if capacity else 0.0


def eviction_of(namespace: Status) -> str:
    """Return the policy of a namespace, the one that it follows now, and a pin."""
    settings, follows = namespace["settings"], namespace["following"]
    now = f" ({follows})" if follows else ""
    pin = ", pin" if settings["pin"] == "on" else ""
    return f"{settings['eviction']}{now}{pin}"


def sample_of(namespace: Status) -> str:
    """Return how far the sample is that gives hit ratios of other sizes, such as `120 of 400`.

    The text is "" once there are ratios, and for a daemon of an earlier version.
    """
    found = namespace.get("hit_ratio_sample")
    if namespace["hit_ratio_at"] or found is None:
        return ""
    return f"{found['seen']} of {found['needed']}"


def _open_times(old: Status, new: Status) -> tuple[float, ...]:
    """Return for each of QUANTILES the least bound of the histogram that so many opens kept."""
    counts = [
        after - before
        for before, after in zip(_opens_by_time(old), _opens_by_time(new), strict=True)
    ]
    total = sum(counts)
    if total <= 0:
        return ()
    bounds = (*new["latencies"]["bounds_s"], float("inf"))
    found = []
    for quantile in QUANTILES:
        reached = accumulate(counts)
        found.append(
            next(b for b, sum_ in zip(bounds, reached, strict=True) if sum_ >= quantile * total)
        )
    return tuple(found)


def _opens_by_time(status: Status) -> list[int]:
    latencies = status["latencies"]
    found = [0] * (len(latencies["bounds_s"]) + 1)
    for tier in latencies["open"].values():
        found = [sum(pair) for pair in zip(found, tier["counts"], strict=True)]
    return found


def between(before: Look, after: Look) -> Rates | None:
    """Return the rates; None if another daemon answered, or no time has passed."""
    seconds = after.at - before.at
    old, new = before.status, after.status
    if seconds <= 0 or _daemon(old) != _daemon(new):
        return None
    was = {one["name"]: opens_of(one) for one in old["namespaces"]}
    moved = {one["name"]: bandwidth_of(one) for one in old["namespaces"]}
    return Rates(
        seconds,
        {name: max(0.0, read(new) - read(old)) / seconds for name, read in FLOWS.items()},
        {
            name: max(0, hits - hits_of(old).get(name, hits)) / seconds
            for name, hits in hits_of(new).items()
        },
        {
            one["name"]: _since(was.get(one["name"], Opens()), opens_of(one), seconds)
            for one in new["namespaces"]
        },
        {
            one["name"]: _since(moved.get(one["name"], Bandwidth()), bandwidth_of(one), seconds)
            for one in new["namespaces"]
        },
        _open_times(old, new),
    )


def _daemon(status: Status) -> tuple[int, int]:
    return status["daemon_pid"], status["takeovers"]


def _since(before: _Counts, after: _Counts, seconds: float) -> _Counts:
    """Return the rates a second; those of a namespace made anew since begin at 0."""
    return type(after)(
        *(max(0, new - old) / seconds for old, new in zip(before, after, strict=True))
    )
