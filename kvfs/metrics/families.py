"""A mount's status as metric families: one table of all metrics.

Contract: `families(status)` gives every metric of METRICS, some without a sample, and no other.
Without a status it gives `kvfs_up` alone. Labels are tiers, namespaces and fixed words. A counter
is 0 before its first event, because otherwise Prometheus would not see its first step. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client import core

from kvfs.errors import DEFECT
from kvfs.units import parse_size

Status = Mapping[str, Any]
Samples = Iterator[tuple[tuple[str, ...], Any]]  # label values, and the value
Read = Callable[[Status], Samples]
Type = Literal["counter", "gauge", "histogram", "summary"]
FAMILIES: dict[Type, type[Any]] = {
    "counter": core.CounterMetricFamily,
    "gauge": core.GaugeMetricFamily,
    "histogram": core.HistogramMetricFamily,
    "summary": core.SummaryMetricFamily,
}

NAMESPACES_MOST = 1000  # others count as one; with templates any program could make more
OTHERS = "(others)"
STATES = ("healthy", "suspect", "down")
# These metrics of a namespace start as 0; the others, which are rare, come with the first event.
USUAL = ("evicted", "expired")
REASONS = ("evicted", "expired", "lost", "stale", "too_large", "unfinished", "incomplete")
DECISIONS = ("admitted", "obliged", "refused_budget", "refused_adaptive")


class Metric(NamedTuple):
    """One metric family: `read` finds its samples in a status."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str
    read: Read


def _value(*path: str) -> Read:
    """Read a value of the mount itself."""

    def read(status: Status) -> Samples:
        found: Any = status
        for name in path:
            found = found.get(name, 0)
        yield (), found

    return read


def _whether(is_so: Callable[[Status], object]) -> Read:
    """Read whether something is so for the mount itself, as 1 or 0."""
    return lambda status: iter([((), bool(is_so(status)))])


def _of_tiers(field: str, scale: float = 1) -> Read:
    """Read the field of each tier that has it."""

    def read(status: Status) -> Samples:
        for name, tier in status["tiers"].items():
            if field in tier:
                yield (name,), tier[field] * scale if scale != 1 else tier[field]

    return read


def _of_bucket(field: str) -> Read:
    def read(status: Status) -> Samples:
        if "s3" in status["tiers"]:
            yield (), status["tiers"]["s3"][field]

    return read


def _words(what: str, words: tuple[str, ...], prefix: str = "") -> Read:
    """Read one sample for each of these words, and for others that turn up beside them."""

    def read(status: Status) -> Samples:
        found = status[what]
        there = {key.removeprefix(prefix) for key in found if prefix and key.startswith(prefix)}
        for word in (*words, *sorted(there - set(words))):
            yield (word,), found.get(f"{prefix}{word}", 0)

    return read


def _evictions(status: Status) -> Samples:
    yield from _words("counters", REASONS, "dropped_")(status)
    if "s3" in status["tiers"]:
        yield ("spilled",), status["tiers"]["s3"]["spilled"]


def _opens(status: Status) -> Samples:
    for by in ("passthrough", "served", "lent"):
        yield (by,), status["counters"].get(f"opens_{by}", 0)


def _states(status: Status) -> Samples:
    for name, tier in status["tiers"].items():
        for state in STATES:
            yield (name, state), tier["state"] == state


def _bucket_errors(status: Status) -> Samples:
    for kind, count in status["tiers"].get("s3", {}).get("errors", {}).items():
        yield (kind,), count


def _errors(status: Status) -> Samples:
    for operation, kinds in status["errors"].items():
        for kind, count in kinds.items():
            yield (operation, kind), count


def _defects(status: Status) -> Samples:
    yield (), sum(kinds.get(DEFECT, 0) for kinds in status["errors"].values())


def _info(status: Status) -> Samples:
    yield (status["version"], _text(status["mountpoint"])), 1


def _scrubbed(field: str) -> Read:

    def read(status: Status) -> Samples:
        for name, found in status["scrub"]["tiers"].items():
            yield (name,), found[field]

    return read


def _last_pass(field: str) -> Read:
    """Read a field of the last pass; 0 before the first one."""

    def read(status: Status) -> Samples:
        last = status["scrub"]["last"]
        yield (), 0 if last is None else last[field]

    return read


def _latencies(kind: str) -> Read:
    """Read a histogram: (upper bound, count of at most that), and the sum of seconds."""

    def read(status: Status) -> Samples:
        bounds = [*map(str, status["latencies"]["bounds_s"]), "+Inf"]
        for tier, found in status["latencies"][kind].items():
            buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
            yield (tier,), (buckets, found["sum_s"])

    return read


# Namespaces


def _text(name: str) -> str:
    """Return a file name, which may be any bytes, as UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _namespaces(status: Status) -> Iterator[tuple[str, Any]]:
    """Yield the namespaces with their labels."""
    for number, one in enumerate(status["namespaces"]):
        yield _text(one["name"]) if number < NAMESPACES_MOST else OTHERS, one


def _sums(found: Iterator[tuple[tuple[str, ...], float]]) -> Samples:
    """Yield sums: namespaces that share labels have one sample."""
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in found:
        sums[labels] += value  # type: ignore[assignment] # bytes and objects are whole, not all is
    yield from sums.items()


def _of_namespaces(field: str) -> Read:
    return lambda status: _sums(((name,), one[field]) for name, one in _namespaces(status))


def _counted(field: str) -> Read:
    return lambda status: _sums(
        ((name,), one["counters"].get(field, 0)) for name, one in _namespaces(status)
    )


def _hits(status: Status) -> Samples:
    return _sums(
        ((name, tier), one["counters"].get(f"read_{tier}", 0))
        for name, one in _namespaces(status)
        for tier in status["tiers"]
    )


def _by_tier(field: str) -> Read:
    return lambda status: _sums(
        ((name, tier), held[field])
        for name, one in _namespaces(status)
        for tier, held in one["tiers"].items()
    )


def _ratios(status: Status) -> Samples:
    """Yield the hit ratios; several namespaces under one label have none."""
    labels = Counter(name for name, _ in _namespaces(status))
    for name, one in _namespaces(status):
        if labels[name] == 1:
            for times, share in one["hit_ratio_at"].items():
                yield (name, times), share


@lru_cache
def _size(text: str) -> float:
    """Return a size in bytes, cached because most namespaces have the same quota."""
    return float(parse_size(text))


def _quotas(status: Status) -> Samples:
    return _sums(
        ((name, kind), _size(one["settings"].get(f"quota_{kind}", "0")))
        for name, one in _namespaces(status)
        for kind in ("soft", "hard")
    )


def _left(status: Status) -> Samples:
    bucket = "s3" in status["tiers"]

    def found() -> Iterator[tuple[tuple[str, ...], float]]:
        for name, one in _namespaces(status):
            counters = one["counters"]
            for reason in REASONS:
                if reason in USUAL or f"dropped_{reason}" in counters:
                    yield (name, reason), counters.get(f"dropped_{reason}", 0)
            if bucket:
                yield (name, "spilled"), counters.get("spilled", 0)

    return _sums(found())


def _opens_of_namespaces(status: Status) -> Samples:
    """Yield the count and seconds of opens."""
    counts = _sums(((name,), one["opens"]["count"]) for name, one in _namespaces(status))
    seconds = _sums(((name,), one["opens"]["sum_s"]) for name, one in _namespaces(status))
    for (labels, count), (_, spent) in zip(counts, seconds, strict=True):
        yield labels, (count, spent)


def _homeless(status: Status) -> Samples:
    return _sums(((name,), int(bool(one["problem"]))) for name, one in _namespaces(status))


def _gauge(name: str, what: str, read: Read | None = None, labels: tuple[str, ...] = ()) -> Metric:
    """Make a gauge; by default it reads the status field of the same name."""
    return Metric(f"kvfs_{name}", "gauge", labels, what, read or _value(name))


def _counter(
    name: str, what: str, read: Read | None = None, labels: tuple[str, ...] = ()
) -> Metric:
    """Make a counter; by default it reads the mount's counter of the same name."""
    read = read or _value("counters", name)
    return Metric(f"kvfs_{name}_total", "counter", labels, what, read)


def _bucket_counter(name: str, what: str) -> Metric:
    return _counter(f"bucket_{name}", what, _of_bucket(name))


TIER, SPACE, BOTH = ("tier",), ("namespace",), ("namespace", "tier")

METRICS = (
    # The mount
    _gauge("info", "always 1", _info, ("version", "mountpoint")),
    _gauge("uptime_seconds", "age of the daemon", _value("uptime_s")),
    _counter("takeovers", "daemons that took over", _value("takeovers")),
    _gauge("keeper_up", "whether the keeper lives", _whether(lambda one: one["keeper_pid"])),
    _gauge("passthrough", "whether it is on", _value("passthrough", "on")),
    _gauge("huge_pages", "whether they are on", _value("huge_pages", "on")),
    _gauge("census_done", "whether all is counted"),
    _gauge("objects", "files, each once"),
    _gauge(
        "objects_out_of_reach",
        "objects that a bucket has which is missing",
        _value("without_bucket"),
    ),
    _gauge("open_handles", "open descriptors"),
    _gauge("writers", "objects that are written"),
    _gauge("jobs", "copies and digests that wait or run"),
    _gauge("writing_back", "whether RAM is emptied"),
    _gauge("trash", "backing files to unlink"),
    _gauge("reclaimable_bytes", "RAM for new files"),
    _counter("opens", "files opened, by who moves the bytes", _opens, ("by",)),
    _counter("evictions", "objects that went, by reason", _evictions, ("reason",)),
    _counter(
        "nvme_writes",
        "objects judged worth a write",
        _words("nvme_writes", DECISIONS),
        ("decision",),
    ),
    _counter("errors", "operations answered with one", _errors, ("operation", "class")),
    _counter("defects", "errors that should not exist", _defects),
    _counter("misses", "opens of names whose bytes nothing could produce"),
    _counter("created", "files made"),
    _counter("sealed", "seals"),
    _counter("settled", "files written to NVMe that were synced and hashed"),
    _counter("verified", "copies on NVMe that opens compared with their digests"),
    _counter("demoted", "copies made from RAM to NVMe"),
    _counter("promoted", "copies made from NVMe to RAM"),
    _counter("promotions_skipped", "promotions without room"),
    _counter("outrun", "files that were published too late"),
    _counter("dropped", "objects that went with all their names"),
    _counter("missing", "backing files that were not there"),
    _counter("quarantined", "backing files found damaged"),
    _counter("swept", "backing files that meant nothing"),
    _counter("mover_failures", "deaths of movers"),
    _counter("job_failures", "copies and digests that failed"),
    _gauge(
        "inodes_unreadable", "records that made no sense", _value("counters", "inodes_unreadable")
    ),
    # How long
    Metric("kvfs_open_seconds", "histogram", TIER, "opens to read", _latencies("open")),
    Metric("kvfs_hydrate_seconds", "histogram", TIER, "objects fetched", _latencies("hydrate")),
    Metric("kvfs_seal_seconds", "histogram", TIER, "last closes of writers", _latencies("seal")),
    # Tiers
    _gauge("tier_capacity_bytes", "to use", _of_tiers("capacity_bytes"), TIER),
    _gauge("tier_used_bytes", "of sealed objects", _of_tiers("used_bytes"), TIER),
    _gauge("tier_reserved_bytes", "set aside", _of_tiers("reserved_bytes"), TIER),
    _gauge("tier_objects", "copies there", _of_tiers("objects"), TIER),
    _counter("tier_hits", "opens answered from it", _of_tiers("hits"), TIER),
    _gauge("tier_state", "1 for its state", _states, ("tier", "state")),
    _gauge("tier_state_seconds", "age of its state", _of_tiers("state_s"), TIER),
    *(
        _counter(name, what, _of_tiers(name), TIER)
        for name, what in (
            ("compressed", "objects made smaller"),
            ("compressed_bytes", "their sizes"),
            ("compressed_to_bytes", "what they became"),
            ("not_compressed", "objects that stayed as they are"),
            ("decompressed", "objects made readable again"),
        )
    ),
    *(
        _counter(f"{name}_cpu_seconds", "processor time", _of_tiers(f"{name}_cpu_us", 1e-6), TIER)
        for name in ("compress", "decompress")
    ),
    # The scrubber
    _counter("scrub_bytes", "verified", _scrubbed("bytes"), TIER),
    _counter("scrub_objects", "copies verified", _scrubbed("objects"), TIER),
    _counter("scrub_rotten", "wrong copies", _scrubbed("rotten"), TIER),
    _counter("scrub_unread", "not readable", _scrubbed("unread"), TIER),
    _counter("scrub_cpu_seconds", "processor time", _value("scrub", "cpu_s")),
    _gauge("scrub_period_seconds", "of a pass; 0: off", _value("scrub", "period_s")),
    _gauge(
        "scrub_paused",
        "whether something holds it up",
        _whether(lambda one: one["scrub"]["state"] == "paused"),
    ),
    _gauge("scrub_progress_ratio", "of the pass, 0 to 1", _value("scrub", "progress")),
    _gauge(
        "scrub_began_timestamp_seconds", "begin of the pass; 0: none yet", _value("scrub", "began")
    ),
    _gauge(
        "scrub_last_completed_timestamp_seconds", "end of the last whole pass", _last_pass("ended")
    ),
    _gauge("scrub_last_duration_seconds", "of the last whole pass", _last_pass("seconds")),
    # The bucket
    _gauge("dirty_bytes", "to be uploaded", _of_tiers("dirty_bytes"), TIER),
    _gauge("dirty_objects", "objects to be there", _of_tiers("dirty_objects"), TIER),
    _gauge("dirty_limit_bytes", "beyond it writers wait", _of_tiers("dirty_most_bytes"), TIER),
    _gauge("dirty_oldest_seconds", "age of the first", _of_tiers("oldest_dirty_s"), TIER),
    _gauge("bucket_loaded", "whether dirty is counted", _of_bucket("loaded")),
    _gauge("bucket_to_delete", "keys to delete", _of_bucket("to_delete")),
    _gauge("bucket_in_conflict", "kept here", _of_bucket("in_conflict")),
    _gauge("bucket_streaming", "objects read early", _of_bucket("streaming")),
    _bucket_counter("uploads", "objects uploaded"),
    _bucket_counter("upload_bytes", "bytes uploaded"),
    _bucket_counter("downloads", "objects downloaded"),
    _bucket_counter("download_bytes", "bytes downloaded"),
    _bucket_counter("headers", "first bytes fetched"),
    _bucket_counter("copies", "objects copied there"),
    _bucket_counter("deletes", "keys deleted"),
    _bucket_counter("conflicts", "names that others had published"),
    _bucket_counter("conflicts_ended", "conflicts whose name became free"),
    _bucket_counter("failures", "requests that failed"),
    _counter("bucket_errors", "those by class", _bucket_errors, ("class",)),
    _bucket_counter("waits", "writers and opens that waited for uploads"),
    _bucket_counter("lookups", "questions about names"),
    _bucket_counter("absent_cached", "questions that were spared"),
    _bucket_counter("found", "objects of others looked up"),
    _bucket_counter("imported", "objects of others listed"),
    _bucket_counter("stale", "objects that others have deleted or replaced"),
    _bucket_counter("refused", "what is no object of kvfs"),
    _bucket_counter("prefetched", "objects fetched ahead"),
    _bucket_counter("prefetch_used", "those that were opened"),
    _bucket_counter("prefetch_wasted", "those that were not"),
    _bucket_counter("warmed", "objects fetched for kvfs warm"),
    # Namespaces
    _gauge("namespace_bytes", "each object once", _of_namespaces("bytes"), SPACE),
    _gauge("namespace_objects", "objects", _of_namespaces("objects"), SPACE),
    _gauge("namespace_tier_bytes", "of its copies there", _by_tier("bytes"), BOTH),
    _gauge("namespace_tier_objects", "its copies there", _by_tier("objects"), BOTH),
    _counter("namespace_hits", "opens to read", _hits, BOTH),
    Metric(
        *("kvfs_namespace_open_seconds", "summary", SPACE, "opens to read"), _opens_of_namespaces
    ),
    _counter("namespace_evictions", "objects", _left, ("namespace", "reason")),
    _counter("namespace_misses", "opens", _counted("misses"), SPACE),
    _counter("namespace_read_bytes", "opened", _counted("read_bytes"), SPACE),
    _counter("namespace_written", "objects", _counted("written"), SPACE),
    _counter("namespace_written_bytes", "of objects written", _counted("written_bytes"), SPACE),
    _gauge("namespace_hit_ratio", "with so much room", _ratios, ("namespace", "times")),
    _gauge(
        "namespace_capacity_objects",
        "what once its room is",
        _of_namespaces("capacity_objects"),
        SPACE,
    ),
    _gauge("namespace_quota_bytes", "0: none", _quotas, ("namespace", "kind")),
    _gauge("namespace_homeless", "whether it has no place", _homeless, SPACE),
)


def families(status: Status | None) -> Iterator[core.Metric]:
    """Yield all families; None: the daemon has not answered."""
    yield core.GaugeMetricFamily(
        "kvfs_up", "whether the daemon answers", value=int(status is not None)
    )
    if status is not None:
        for metric in METRICS:
            family: Any = FAMILIES[metric.type](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(status):
                # A histogram has the buckets and the sum, a summary the count and the sum.
                family.add_metric(labels, *(value if isinstance(value, tuple) else (float(value),)))
            yield family
