"""A mount's status as metric families: one table of all there is.

Contract: `families(status)` gives every metric of METRICS, some without a sample, and no other;
without a status it is `kvfs_up` alone. Labels are tiers, namespaces and fixed words.
A counter is there, as 0, before anything was counted, or its first step would not be seen. Pure.
Not for asking the daemon.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

from kvfs.errors import DEFECT
from kvfs.units import parse_size

Status = Mapping[str, Any]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | SummaryMetricFamily
Samples = Iterator[tuple[tuple[str, ...], Any]]  # label values, and the value
Type = Literal["counter", "gauge", "histogram", "summary"]

NAMESPACES_MOST = 1000  # the rest, with templates anybody could make more, are one
OTHERS = "(others)"
STATES = ("healthy", "suspect", "down")
# Those of a namespace that are there as 0; the others, which are rare, come with the first one.
USUAL = ("evicted", "expired")
REASONS = ("evicted", "expired", "lost", "stale", "too_large", "unfinished", "incomplete")
DECISIONS = ("admitted", "obliged", "refused_budget", "refused_adaptive")


class Metric(NamedTuple):
    """One family: `read` finds its samples in a status."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str
    read: Callable[[Status], Samples]


def _value(*path: str) -> Callable[[Status], Samples]:
    """Of the mount itself."""

    def read(status: Status) -> Samples:
        found: Any = status
        for name in path:
            found = found.get(name, 0)
        yield (), found

    return read


def _of_tiers(field: str, scale: float = 1) -> Callable[[Status], Samples]:
    """Of each tier that has the field."""

    def read(status: Status) -> Samples:
        for name, tier in status["tiers"].items():
            if field in tier:
                yield (name,), tier[field] * scale if scale != 1 else tier[field]

    return read


def _of_bucket(field: str) -> Callable[[Status], Samples]:
    def read(status: Status) -> Samples:
        if "s3" in status["tiers"]:
            yield (), status["tiers"]["s3"][field]

    return read


def _words(what: str, words: tuple[str, ...], prefix: str = "") -> Callable[[Status], Samples]:
    """One sample for each of these words, and for those that turn up beside them."""

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


def _scrubbed(field: str) -> Callable[[Status], Samples]:
    """Of the scrubber, by tier."""

    def read(status: Status) -> Samples:
        for name, found in status["scrub"]["tiers"].items():
            yield (name,), found[field]

    return read


def _last_pass(field: str) -> Callable[[Status], Samples]:
    """0 before there was one."""

    def read(status: Status) -> Samples:
        last = status["scrub"]["last"]
        yield (), 0 if last is None else last[field]

    return read


def _latencies(kind: str) -> Callable[[Status], Samples]:
    """A histogram: (upper bound, count of at most that), and the sum of seconds."""

    def read(status: Status) -> Samples:
        bounds = [*map(str, status["latencies"]["bounds_s"]), "+Inf"]
        for tier, found in status["latencies"][kind].items():
            buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
            yield (tier,), (buckets, found["sum_s"])

    return read


# Namespaces


def _text(name: str) -> str:
    """A file name may be any bytes; what is scraped is UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _namespaces(status: Status) -> Iterator[tuple[str, Any]]:
    """With their labels."""
    for number, one in enumerate(status["namespaces"]):
        yield _text(one["name"]) if number < NAMESPACES_MOST else OTHERS, one


def _sums(found: Iterator[tuple[tuple[str, ...], float]]) -> Samples:
    """Labels that several namespaces share have one sample."""
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in found:
        sums[labels] += value  # type: ignore[assignment] # bytes and objects are whole, not all is
    yield from sums.items()


def _of_namespaces(field: str) -> Callable[[Status], Samples]:
    return lambda status: _sums(((name,), one[field]) for name, one in _namespaces(status))


def _counted(field: str) -> Callable[[Status], Samples]:
    return lambda status: _sums(
        ((name,), one["counters"].get(field, 0)) for name, one in _namespaces(status)
    )


def _hits(status: Status) -> Samples:
    return _sums(
        ((name, tier), one["counters"].get(f"read_{tier}", 0))
        for name, one in _namespaces(status)
        for tier in status["tiers"]
    )


def _by_tier(field: str) -> Callable[[Status], Samples]:
    return lambda status: _sums(
        ((name, tier), held[field])
        for name, one in _namespaces(status)
        for tier, held in one["tiers"].items()
    )


def _ratios(status: Status) -> Samples:
    """None of several together."""
    labels = Counter(name for name, _ in _namespaces(status))
    for name, one in _namespaces(status):
        if labels[name] == 1:
            for times, share in one["hit_ratio_at"].items():
                yield (name, times), share


@lru_cache
def _size(text: str) -> float:
    """Most have the same quota."""
    return float(parse_size(text))


def _quotas(status: Status) -> Samples:
    return _sums(
        ((name, kind), _size(one["settings"].get(f"quota_{kind}", "0")))
        for name, one in _namespaces(status)
        for kind in ("soft", "hard")
    )


def _left(status: Status) -> Samples:
    """What went of each namespace, by reason."""
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
    """Count and seconds."""
    counts = _sums(((name,), one["opens"]["count"]) for name, one in _namespaces(status))
    seconds = _sums(((name,), one["opens"]["sum_s"]) for name, one in _namespaces(status))
    for (labels, count), (_, spent) in zip(counts, seconds, strict=True):
        yield labels, (count, spent)


def _homeless(status: Status) -> Samples:
    return _sums(((name,), int(bool(one["problem"]))) for name, one in _namespaces(status))


def _counter(name: str, what: str) -> Metric:
    """A counter of the mount."""
    return Metric(f"kvfs_{name}_total", "counter", (), what, _value("counters", name))


def _bucket_counter(name: str, what: str) -> Metric:
    return Metric(f"kvfs_bucket_{name}_total", "counter", (), what, _of_bucket(name))


TIER, SPACE = ("tier",), ("namespace",)

METRICS = (
    # The mount
    Metric("kvfs_info", "gauge", ("version", "mountpoint"), "always 1", _info),
    Metric("kvfs_uptime_seconds", "gauge", (), "age of the daemon", _value("uptime_s")),
    Metric("kvfs_takeovers_total", "counter", (), "daemons that took over", _value("takeovers")),
    Metric(
        *("kvfs_keeper_up", "gauge", (), "whether the keeper lives"),
        lambda status: iter([((), bool(status["keeper_pid"]))]),
    ),
    Metric("kvfs_passthrough", "gauge", (), "whether it is on", _value("passthrough", "on")),
    Metric("kvfs_huge_pages", "gauge", (), "whether they are on", _value("huge_pages", "on")),
    Metric("kvfs_census_done", "gauge", (), "whether all is counted", _value("census_done")),
    Metric("kvfs_objects", "gauge", (), "files, each once", _value("objects")),
    Metric(
        *("kvfs_objects_out_of_reach", "gauge", (), "objects that a bucket has which is missing"),
        _value("without_bucket"),
    ),
    Metric("kvfs_open_handles", "gauge", (), "open descriptors", _value("open_handles")),
    Metric("kvfs_writers", "gauge", (), "objects that are written", _value("writers")),
    Metric("kvfs_jobs", "gauge", (), "copies and digests that wait or run", _value("jobs")),
    Metric("kvfs_writing_back", "gauge", (), "whether RAM is emptied", _value("writing_back")),
    Metric("kvfs_trash", "gauge", (), "backing files to unlink", _value("trash")),
    Metric(
        *("kvfs_reclaimable_bytes", "gauge", (), "RAM for new files"), _value("reclaimable_bytes")
    ),
    Metric("kvfs_opens_total", "counter", ("by",), "files opened, by who moves the bytes", _opens),
    Metric(
        *("kvfs_evictions_total", "counter", ("reason",), "objects that went, by reason"),
        _evictions,
    ),
    Metric(
        *("kvfs_nvme_writes_total", "counter", ("decision",), "objects judged worth a write"),
        _words("nvme_writes", DECISIONS),
    ),
    Metric(
        *("kvfs_errors_total", "counter", ("operation", "class"), "operations answered with one"),
        _errors,
    ),
    Metric("kvfs_defects_total", "counter", (), "errors that should not exist", _defects),
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
    Metric(
        *("kvfs_inodes_unreadable", "gauge", (), "records that made no sense"),
        _value("counters", "inodes_unreadable"),
    ),
    # How long
    Metric("kvfs_open_seconds", "histogram", TIER, "opens to read", _latencies("open")),
    Metric("kvfs_hydrate_seconds", "histogram", TIER, "objects fetched", _latencies("hydrate")),
    Metric("kvfs_seal_seconds", "histogram", TIER, "last closes of writers", _latencies("seal")),
    # Tiers
    Metric("kvfs_tier_capacity_bytes", "gauge", TIER, "to use", _of_tiers("capacity_bytes")),
    Metric("kvfs_tier_used_bytes", "gauge", TIER, "of sealed objects", _of_tiers("used_bytes")),
    Metric("kvfs_tier_reserved_bytes", "gauge", TIER, "set aside", _of_tiers("reserved_bytes")),
    Metric("kvfs_tier_objects", "gauge", TIER, "copies there", _of_tiers("objects")),
    Metric("kvfs_tier_hits_total", "counter", TIER, "opens answered from it", _of_tiers("hits")),
    Metric("kvfs_tier_state", "gauge", ("tier", "state"), "1 for its state", _states),
    Metric("kvfs_tier_state_seconds", "gauge", TIER, "age of its state", _of_tiers("state_s")),
    *(
        Metric(f"kvfs_{name}_total", "counter", TIER, what, _of_tiers(name))
        for name, what in (
            ("compressed", "objects made smaller"),
            ("compressed_bytes", "their sizes"),
            ("compressed_to_bytes", "what they became"),
            ("not_compressed", "objects that stayed as they are"),
            ("decompressed", "objects made readable again"),
        )
    ),
    *(
        Metric(
            *(f"kvfs_{name}_cpu_seconds_total", "counter", TIER, "processor time"),
            _of_tiers(f"{name}_cpu_us", 1e-6),
        )
        for name in ("compress", "decompress")
    ),
    # The scrubber
    Metric("kvfs_scrub_bytes_total", "counter", TIER, "verified", _scrubbed("bytes")),
    Metric("kvfs_scrub_objects_total", "counter", TIER, "copies verified", _scrubbed("objects")),
    Metric("kvfs_scrub_rotten_total", "counter", TIER, "wrong copies", _scrubbed("rotten")),
    Metric("kvfs_scrub_unread_total", "counter", TIER, "not readable", _scrubbed("unread")),
    Metric(
        *("kvfs_scrub_cpu_seconds_total", "counter", (), "processor time"),
        _value("scrub", "cpu_s"),
    ),
    Metric(
        *("kvfs_scrub_period_seconds", "gauge", (), "of a pass; 0: off"),
        _value("scrub", "period_s"),
    ),
    Metric(
        *("kvfs_scrub_paused", "gauge", (), "whether something holds it up"),
        lambda status: iter([((), status["scrub"]["state"] == "paused")]),
    ),
    Metric(
        *("kvfs_scrub_progress_ratio", "gauge", (), "of the pass, 0 to 1"),
        _value("scrub", "progress"),
    ),
    Metric(
        *("kvfs_scrub_began_timestamp_seconds", "gauge", (), "begin of the pass; 0: none yet"),
        _value("scrub", "began"),
    ),
    Metric(
        *("kvfs_scrub_last_completed_timestamp_seconds", "gauge", (), "end of the last whole pass"),
        _last_pass("ended"),
    ),
    Metric(
        *("kvfs_scrub_last_duration_seconds", "gauge", (), "of the last whole pass"),
        _last_pass("seconds"),
    ),
    # The bucket
    Metric("kvfs_dirty_bytes", "gauge", TIER, "to be uploaded", _of_tiers("dirty_bytes")),
    Metric("kvfs_dirty_objects", "gauge", TIER, "objects to be there", _of_tiers("dirty_objects")),
    Metric(
        *("kvfs_dirty_limit_bytes", "gauge", TIER, "beyond it writers wait"),
        _of_tiers("dirty_most_bytes"),
    ),
    Metric(
        *("kvfs_dirty_oldest_seconds", "gauge", TIER, "age of the first"),
        _of_tiers("oldest_dirty_s"),
    ),
    Metric("kvfs_bucket_loaded", "gauge", (), "whether dirty is counted", _of_bucket("loaded")),
    Metric("kvfs_bucket_to_delete", "gauge", (), "keys to delete", _of_bucket("to_delete")),
    Metric("kvfs_bucket_in_conflict", "gauge", (), "kept here", _of_bucket("in_conflict")),
    Metric("kvfs_bucket_streaming", "gauge", (), "objects read early", _of_bucket("streaming")),
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
    Metric("kvfs_bucket_errors_total", "counter", ("class",), "those by class", _bucket_errors),
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
    Metric("kvfs_namespace_bytes", "gauge", SPACE, "each object once", _of_namespaces("bytes")),
    Metric("kvfs_namespace_objects", "gauge", SPACE, "objects", _of_namespaces("objects")),
    Metric(
        *("kvfs_namespace_tier_bytes", "gauge", ("namespace", "tier"), "of its copies there"),
        _by_tier("bytes"),
    ),
    Metric(
        *("kvfs_namespace_tier_objects", "gauge", ("namespace", "tier"), "its copies there"),
        _by_tier("objects"),
    ),
    Metric(
        *("kvfs_namespace_hits_total", "counter", ("namespace", "tier"), "opens to read"), _hits
    ),
    Metric(
        *("kvfs_namespace_open_seconds", "summary", SPACE, "opens to read"), _opens_of_namespaces
    ),
    Metric(
        *("kvfs_namespace_evictions_total", "counter", ("namespace", "reason"), "objects"), _left
    ),
    Metric("kvfs_namespace_misses_total", "counter", SPACE, "opens", _counted("misses")),
    Metric("kvfs_namespace_read_bytes_total", "counter", SPACE, "opened", _counted("read_bytes")),
    Metric("kvfs_namespace_written_total", "counter", SPACE, "objects", _counted("written")),
    Metric(
        *("kvfs_namespace_written_bytes_total", "counter", SPACE, "of objects written"),
        _counted("written_bytes"),
    ),
    Metric(
        *("kvfs_namespace_hit_ratio", "gauge", ("namespace", "times"), "with so much room"), _ratios
    ),
    Metric(
        *("kvfs_namespace_capacity_objects", "gauge", SPACE, "what once its room is"),
        _of_namespaces("capacity_objects"),
    ),
    Metric("kvfs_namespace_quota_bytes", "gauge", ("namespace", "kind"), "0: none", _quotas),
    Metric("kvfs_namespace_homeless", "gauge", SPACE, "whether it has no place", _homeless),
)


def families(status: Status | None) -> Iterator[Family]:
    """All that there is to say; None: the daemon has not answered."""
    yield GaugeMetricFamily("kvfs_up", "whether the daemon answers", value=int(status is not None))
    for metric in METRICS if status is not None else ():
        assert status is not None
        yield _family(metric, list(metric.read(status)))


def _family(metric: Metric, samples: list[tuple[tuple[str, ...], Any]]) -> Family:
    if metric.type == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, (buckets, seconds) in samples:
            histogram.add_metric(labels, buckets, seconds)
        return histogram
    if metric.type == "summary":
        summary = SummaryMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, (count, seconds) in samples:
            summary.add_metric(labels, count, seconds)
        return summary
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family
