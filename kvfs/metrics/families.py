"""A mount's status as metric families: one table of all metrics.

Contract: `families(status)` gives every metric of METRICS, some without a sample, and no other but
those of RENAMED under their old names.
Without a status it gives `kvfs_up` alone. Labels are tiers, namespaces and fixed words. A counter
is 0 before its first event, because otherwise Prometheus would not see its first step. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prometheus_client import core

from kvfs.errors import DEFECT
from kvfs.metrics.renamed import RENAMED, old_help
from kvfs.rates import hits_of
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
REASONS = (
    *("evicted", "expired", "lost", "stale", "too_large", "unfinished", "incomplete"),
    *("asked", "version", "quota", "shrunk"),
)
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


def _of_pool(*path: str) -> Read:
    def read(status: Status) -> Samples:
        found: Any = status.get("pool")  # an earlier daemon has none
        if found is not None:
            for name in path:
                found = None if found is None else found.get(name)  # an earlier daemon lacks some
            if found is not None:
                yield (), found

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


def _fast_objects(status: Status) -> Samples:
    yield (), status.get("fast_open", {"objects": 0})["objects"]  # an earlier daemon has none


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
        for tier, found in status["latencies"][kind].items():
            yield (tier,), _histogram(status, found)

    return read


def _histogram(status: Status, found: Mapping[str, Any]) -> tuple[list[tuple[str, int]], float]:
    bounds = [*map(str, status["latencies"]["bounds_s"]), "+Inf"]
    return list(zip(bounds, accumulate(found["counts"]), strict=True)), found["sum_s"]


def _fetch_seconds(status: Status) -> Samples:
    found = (status.get("pool") or {}).get("fetch_seconds")  # an earlier daemon has none
    if found is not None:
        yield (), _histogram(status, found)


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
        for tier in hits_of(status)
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


TIER, SPACE, BOTH = ("tier",), ("namespace",), ("namespace", "tier")


def _tier_gauge(name: str, what: str, field: str | None = None) -> Metric:
    return _gauge(name, what, _of_tiers(field or name.removeprefix("tier_")), TIER)


def _tier_counter(name: str, what: str, field: str | None = None) -> Metric:
    return _counter(name, what, _of_tiers(field or name.removeprefix("tier_")), TIER)


def _bucket_gauge(name: str, what: str, field: str | None = None) -> Metric:
    return _gauge(f"bucket_{name}", what, _of_bucket(field or name))


def _pool_gauge(name: str, what: str, *path: str) -> Metric:
    return _gauge(f"pool_{name}", what, _of_pool(*path))


def _pool_counter(name: str, what: str, field: str) -> Metric:
    return _counter(f"pool_{name}", what, _of_pool("counters", field))


def _bucket_counter(name: str, what: str, field: str | None = None) -> Metric:
    return _counter(f"bucket_{name}", what, _of_bucket(field or name))


def _space_gauge(name: str, what: str) -> Metric:
    return _gauge(f"namespace_{name}", what, _of_namespaces(name), SPACE)


def _space_counter(name: str, what: str, field: str | None = None) -> Metric:
    return _counter(f"namespace_{name}", what, _counted(field or name), SPACE)


METRICS = (
    # The mount
    _gauge(
        "info", "Version and mount point as labels. Always 1.", _info, ("version", "mountpoint")
    ),
    _gauge("uptime_seconds", "Seconds since this daemon began to serve.", _value("uptime_s")),
    _counter(
        "takeovers",
        "Takeovers of the mount by another daemon, since the mount.",
        _value("takeovers"),
    ),
    _gauge("keeper_up", "1 if the keeper lives, else 0.", _whether(lambda one: one["keeper_pid"])),
    _gauge(
        "attached",
        "1 if the mount is at its mount point, 0 if it is detached.",
        _whether(lambda one: one.get("state") != "detached"),  # an earlier daemon has none
    ),
    _gauge("passthrough", "1 if the kernel moves the bytes, else 0.", _value("passthrough", "on")),
    _gauge("huge_pages", "1 if the RAM tier has huge pages, else 0.", _value("huge_pages", "on")),
    _gauge("census_done", "1 if the census is done, else 0."),
    _gauge("objects", "Objects of the mount, each counted once."),
    _gauge(
        "objects_out_of_reach",
        "Objects that only a bucket has, while the mount has no bucket.",
        _value("without_bucket"),
    ),
    _gauge("open_handles", "Open file handles and leases."),
    _gauge("writers", "Objects that are being written."),
    _gauge("jobs", "Copies and digests that run or wait."),
    _gauge(
        "writeback_active",
        "1 while kvfs writes back before an unmount, else 0.",
        _value("writing_back"),
    ),
    _gauge("trash_files", "Files in local tiers that kvfs has yet to unlink.", _value("trash")),
    _gauge("reclaimable_bytes", "Bytes of RAM that a new file can get without waiting."),
    _counter("opens", "Opens of files that were not open yet.", _opens, ("by",)),
    _counter(
        "fast_opens",
        "Opens that a thread answered, without the daemon's loop.",
        _value("counters", "opens_fast"),
    ),
    _counter(
        "fast_lookups",
        "Lookups of absent names that a thread answered, without the loop.",
        _value("counters", "lookups_fast"),
    ),
    _gauge("fast_objects", "Objects whose opens need no daemon.", _fast_objects),
    _counter(
        "evictions",
        "Objects dropped, or evicted from all local tiers, by reason.",
        _evictions,
        ("reason",),
    ),
    _counter(
        "nvme_writes",
        "Decisions to write an object to NVMe or not.",
        _words("nvme_writes", DECISIONS),
        ("decision",),
    ),
    _counter("errors", "Operations answered with an error.", _errors, ("operation", "class")),
    _counter(
        "defects",
        "Operations that failed because of a defect of kvfs, each with a traceback in the log.",
        _defects,
    ),
    _counter("misses", "Lookups of absent blocks, and opens of objects whose bytes no tier has."),
    _counter("opens_unreadable", "Opens of objects whose bytes no tier has: they are misses, too."),
    _counter("files_created", "Files created.", _value("counters", "created")),
    _counter("seals", "Seals of files with new content.", _value("counters", "sealed")),
    _counter(
        "files_settled",
        "Files written to NVMe directly, then synced and hashed.",
        _value("counters", "settled"),
    ),
    _counter(
        "copies_verified",
        "Copies on NVMe that kvfs compared with their digests at an open.",
        _value("counters", "verified"),
    ),
    _counter("demotions", "Copies made from RAM to NVMe.", _value("counters", "demoted")),
    _counter("promotions", "Copies made from NVMe to RAM.", _value("counters", "promoted")),
    _counter("promotions_skipped", "Promotions skipped because RAM had no room."),
    _counter(
        "files_outrun",
        "Files with publish=close that lost their name to another file.",
        _value("counters", "outrun"),
    ),
    _counter(
        "objects_dropped", "Objects dropped with all their names.", _value("counters", "dropped")
    ),
    _counter(
        "copies_missing",
        "Copies in local tiers that were not at their place.",
        _value("counters", "missing"),
    ),
    _counter(
        "copies_quarantined",
        "Damaged copies moved to quarantine.",
        _value("counters", "quarantined"),
    ),
    _counter(
        "files_swept",
        "Files in local tiers that no record named, and that kvfs removed.",
        _value("counters", "swept"),
    ),
    _counter("mover_failures", "Movers that died."),
    _counter("job_failures", "Copies and digests that failed."),
    _gauge(
        "inodes_unreadable",
        "Invalid records of objects in the catalog.",
        _value("counters", "inodes_unreadable"),
    ),
    # How long
    Metric(
        *("kvfs_open_seconds", "histogram", TIER),
        *("Seconds of successful opens for reading, by tier of the bytes.", _latencies("open")),
    ),
    Metric(
        *("kvfs_hydrate_seconds", "histogram", TIER),
        *("Seconds from the request to the end of an object's download.", _latencies("hydrate")),
    ),
    Metric(
        *("kvfs_seal_seconds", "histogram", TIER),
        *("Seconds of last closes by writers, until the seal.", _latencies("seal")),
    ),
    # Tiers
    _tier_gauge("tier_capacity_bytes", "Bytes that the tier may use now."),
    _tier_gauge("tier_used_bytes", "Bytes of sealed objects in the tier."),
    _tier_gauge(
        "tier_reserved_bytes", "Bytes reserved in the tier for files that are being written."
    ),
    _tier_gauge("tier_objects", "Copies of objects in the tier."),
    _counter(
        "tier_hits",
        "Opens for reading that the tier served, also of objects that were open already.",
        lambda status: iter([((name,), hits) for name, hits in hits_of(status).items()]),
        TIER,
    ),
    _gauge(
        "tier_state", "1 for the current state of the tier, else 0.", _states, ("tier", "state")
    ),
    _tier_gauge("tier_state_seconds", "Seconds since the state of the tier changed.", "state_s"),
    _tier_counter("objects_compressed", "Objects compressed for the tier.", "compressed"),
    _tier_counter("compressed_bytes", "Bytes of compressed objects before their compression."),
    _tier_counter("compressed_to_bytes", "Bytes of compressed objects after their compression."),
    _tier_counter(
        "objects_not_compressed",
        "Objects left uncompressed, because compression did not pay.",
        "not_compressed",
    ),
    _tier_counter(
        "objects_decompressed", "Objects read from the tier and decompressed.", "decompressed"
    ),
    *(
        _counter(
            f"{name}_cpu_seconds",
            f"Seconds of CPU time spent to {name} objects of the tier.",
            _of_tiers(f"{name}_cpu_us", 1e-6),
            TIER,
        )
        for name in ("compress", "decompress")
    ),
    # The scrubber
    _counter("scrub_bytes", "Bytes of copies that the scrub verified.", _scrubbed("bytes"), TIER),
    _counter("scrub_objects", "Copies that the scrub verified.", _scrubbed("objects"), TIER),
    _counter(
        "scrub_rotten_copies",
        "Copies whose bytes differ from their digest.",
        _scrubbed("rotten"),
        TIER,
    ),
    _counter(
        "scrub_unread_copies", "Copies that the scrub could not read.", _scrubbed("unread"), TIER
    ),
    _counter("scrub_cpu_seconds", "Seconds of CPU time of the scrub.", _value("scrub", "cpu_s")),
    _gauge(
        "scrub_period_seconds",
        "Seconds for one pass of the scrub. 0 if the scrub is off.",
        _value("scrub", "period_s"),
    ),
    _gauge(
        "scrub_paused",
        "1 while the scrub is paused, else 0.",
        _whether(lambda one: one["scrub"]["state"] == "paused"),
    ),
    _gauge(
        "scrub_progress_ratio",
        "Share of the pass that is done, by bytes, from 0 to 1.",
        _value("scrub", "progress"),
    ),
    _gauge(
        "scrub_began_timestamp_seconds",
        "Unix time at which the current or last pass began. 0 before the first.",
        _value("scrub", "began"),
    ),
    _gauge(
        "scrub_last_completed_timestamp_seconds",
        "Unix time at which the last whole pass ended. 0 before the first.",
        _last_pass("ended"),
    ),
    _gauge(
        "scrub_last_duration_seconds",
        "Seconds that the last whole pass took. 0 before the first.",
        _last_pass("seconds"),
    ),
    # The bucket
    _tier_gauge("dirty_bytes", "Bytes of sealed objects that are not yet in the bucket."),
    _tier_gauge("dirty_objects", "Objects whose bytes or names are not yet in the bucket."),
    _tier_gauge(
        "dirty_limit_bytes", "Dirty bytes at which writers begin to wait.", "dirty_most_bytes"
    ),
    _tier_gauge(
        "dirty_oldest_seconds",
        "Seconds since the seal of the oldest dirty object.",
        "oldest_dirty_s",
    ),
    _bucket_gauge(
        "dirty_loaded", "1 if the dirty objects of earlier mounts are counted, else 0.", "loaded"
    ),
    _bucket_gauge("keys_to_delete", "Keys that kvfs has yet to delete in the bucket.", "to_delete"),
    _bucket_gauge(
        "objects_in_conflict",
        "Objects that stay on this node, because other objects have their names in the bucket.",
        "in_conflict",
    ),
    _bucket_gauge(
        "objects_streaming", "Objects that programs read during their download.", "streaming"
    ),
    _bucket_counter("uploads", "Objects uploaded to the bucket."),
    _bucket_counter("upload_bytes", "Bytes of objects uploaded to the bucket."),
    _bucket_counter("downloads", "Objects downloaded from the bucket."),
    _bucket_counter("download_bytes", "Bytes of objects downloaded from the bucket."),
    _bucket_counter("headers", "Objects whose first 4 KiB were downloaded for a directory scan."),
    _bucket_counter("copies", "Objects copied within the bucket to another name."),
    _bucket_counter("deletes", "Keys deleted in the bucket."),
    _bucket_counter("conflicts", "Objects whose name another node published with other bytes."),
    _bucket_counter("conflicts_ended", "Objects in conflict whose name became free."),
    _bucket_counter("failures", "Requests that the store failed or did not answer."),
    _counter(
        "bucket_errors",
        "Requests to the bucket that failed, by class of error.",
        _bucket_errors,
        ("class",),
    ),
    _bucket_counter("waits", "Times that a writer or an open waited for an upload to the bucket."),
    _bucket_counter("lookups", "Lookups of names in the bucket."),
    _bucket_counter(
        "lookups_saved",
        "Lookups that sent no request: a lookup of the last second found the name absent.",
        "absent_cached",
    ),
    _bucket_counter("objects_found", "Objects of other nodes that lookups found.", "found"),
    _bucket_counter("objects_imported", "Objects of other nodes that listings found.", "imported"),
    _bucket_counter(
        "objects_stale", "Objects that another node deleted or replaced in the bucket.", "stale"
    ),
    _bucket_counter(
        "keys_refused", "Keys skipped because kvfs cannot serve them as objects.", "refused"
    ),
    _bucket_counter(
        "objects_prefetched",
        "Objects downloaded ahead of an open, which is expected soon.",
        "prefetched",
    ),
    _bucket_counter(
        "prefetches_used", "Prefetched objects that were opened within a minute.", "prefetch_used"
    ),
    _bucket_counter(
        "prefetches_wasted",
        "Prefetched objects that were not opened within a minute.",
        "prefetch_wasted",
    ),
    _bucket_counter(
        "objects_warmed", "Objects downloaded from the bucket for kvfs warm.", "warmed"
    ),
    # The pool
    _pool_gauge("index_up", "Whether the index of the pool answers (1) or not (0).", "index", "up"),
    _pool_gauge(
        "index_full", "Whether the index of the pool takes no new objects (1).", "index", "full"
    ),
    _pool_gauge(
        "nodes",
        "Live nodes of the pool, with this one; of before, while the index is down.",
        "nodes_live",
    ),
    _pool_gauge("serving", "Whether other nodes can read from this node (1) or not (0).", "serves"),
    _pool_gauge(
        "files_refused",
        "Whether new files of pool_tls or pool_credentials are not used (1).",
        "files_refused",
    ),
    _pool_gauge(
        "certificate_not_before_seconds",
        "Begin of the certificate of pool_tls in use, in s since 1970.",
        *("certificate", "since"),
    ),
    _pool_gauge(
        "certificate_not_after_seconds",
        "End of the certificate of pool_tls in use, in s since 1970.",
        *("certificate", "until"),
    ),
    _pool_gauge(
        "certificate_ends_soon",
        "Whether that is in the last fifth of its time and in 14 days (1), or later (0).",
        *("certificate", "ends_soon"),
    ),
    _pool_gauge("objects", "Objects of this node that the index of the pool has.", "objects"),
    _pool_gauge("bytes", "Bytes of the objects of this node in the pool.", "bytes"),
    _pool_gauge(
        "objects_streaming",
        "Objects of other nodes that programs read while they come.",
        "streaming",
    ),
    _pool_gauge(
        "lag_seconds", "Age of the oldest change that the index of the pool lacks.", "lag_s"
    ),
    _pool_counter("lookups", "Lookups of names in the index of the pool.", "lookups"),
    _pool_counter("objects_found", "Objects of other nodes that lookups found.", "found"),
    _pool_counter(
        "lookups_saved", "Lookups answered by the memory of an absent name.", "absent_cached"
    ),
    _pool_counter("announcements", "Announcements of objects in the pool.", "announced"),
    _pool_counter(
        "withdrawals", "Objects that this node dropped, and other nodes may keep.", "withdrawn"
    ),
    _pool_counter(
        "unlinks", "Objects that this node unlinked or replaced for all nodes.", "unlinked"
    ),
    _pool_counter("index_failures", "Lookups that the index did not answer.", "failures"),
    _pool_counter("fetches", "Objects fetched from other nodes.", "fetched"),
    _pool_counter("fetch_bytes", "Bytes of the objects fetched from other nodes.", "fetched_bytes"),
    _pool_counter("fetch_failures", "Requests to other nodes that failed.", "failed"),
    Metric(
        *("kvfs_pool_fetch_seconds", "histogram", ()),
        *("Seconds from the beginning to the end of an object's fetch.", _fetch_seconds),
    ),
    _pool_counter(
        "objects_handed_over",
        "Objects that another node took over before their eviction here.",
        "handed_over",
    ),
    _pool_counter(
        "objects_taken_over", "Objects taken over from nodes that evict them.", "taken_over"
    ),
    _pool_counter("served_requests", "Reads of objects here by other nodes.", "served"),
    _pool_counter("served_bytes", "Bytes of objects sent to other nodes.", "served_bytes"),
    _pool_counter(
        "served_failures",
        "Reads by other nodes that got no bytes, of objects that have gone.",
        "served_failed",
    ),
    _pool_counter(
        "reports_refused", "Datagrams that are no reports of nginx about a read.", "reports_wrong"
    ),
    _pool_counter(
        "objects_in_conflict", "Objects whose name another node announced first.", "conflicts"
    ),
    _pool_counter(
        "objects_stale", "Objects that another node unlinked or replaced in the pool.", "stale"
    ),
    # Namespaces
    _space_gauge("bytes", "Physical bytes of the namespace's objects, each counted once."),
    _space_gauge("objects", "Objects in the namespace."),
    _gauge(
        "namespace_tier_bytes",
        "Bytes of the namespace's copies in the tier.",
        _by_tier("bytes"),
        BOTH,
    ),
    _gauge(
        "namespace_tier_objects", "Copies of the namespace in the tier.", _by_tier("objects"), BOTH
    ),
    _counter("namespace_hits", "Opens for reading, by tier that had the bytes.", _hits, BOTH),
    Metric(
        *("kvfs_namespace_open_seconds", "summary", SPACE),
        *("Seconds of successful opens for reading.", _opens_of_namespaces),
    ),
    _counter(
        "namespace_evictions",
        "Objects dropped, or evicted from all local tiers, by reason.",
        _left,
        ("namespace", "reason"),
    ),
    _space_counter(
        "misses", "Lookups of absent blocks, and opens of objects whose bytes no tier has."
    ),
    _space_counter("opens_unreadable", "Opens of objects whose bytes no tier has."),
    _space_counter("opened_bytes", "Bytes of the objects opened for reading.", "read_bytes"),
    _space_counter("objects_written", "Objects made or changed in the namespace.", "written"),
    _space_counter("written_bytes", "Bytes that writers wrote in the namespace. See below."),
    _gauge(
        "namespace_hit_ratio_estimate",
        "What-if hit ratio from 0 to 1, by factor of the room. 1 estimates the measured ratio.",
        _ratios,
        ("namespace", "times"),
    ),
    _space_gauge("capacity_objects", "Objects of the current mean size for which there is room."),
    _gauge(
        "namespace_quota_bytes",
        "Bytes of the namespace's quota. 0 if there is none.",
        _quotas,
        ("namespace", "kind"),
    ),
    _gauge(
        "namespace_without_tier",
        "1 if the mount has no tier for the namespace, else 0.",
        _homeless,
        SPACE,
    ),
)


def families(status: Status | None) -> Iterator[core.Metric]:
    """Yield all families; None: the daemon has not answered."""
    yield core.GaugeMetricFamily(
        "kvfs_up", "1 if the daemon answers, else 0.", value=int(status is not None)
    )
    if status is not None:
        for metric in METRICS:
            samples = list(metric.read(status))
            yield _family(metric.name, metric.help, metric, samples)
            if old := RENAMED.get(metric.name):
                yield _family(old, old_help(metric.name), metric, samples)


def _family(
    name: str, what: str, metric: Metric, samples: Iterable[tuple[tuple[str, ...], Any]]
) -> core.Metric:
    family: Any = FAMILIES[metric.type](name, what, labels=metric.labels)
    for labels, value in samples:
        # A histogram has the buckets and the sum, a summary the count and the sum.
        family.add_metric(labels, *(value if isinstance(value, tuple) else (float(value),)))
    made: core.Metric = family
    return made
