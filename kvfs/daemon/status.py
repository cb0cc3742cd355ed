"""The status of a mount, as `kvfs status` and its JSON show it.

Contract: plain values, and no wait; docs and monitoring know the names.
"""

import os
import time
from typing import Any

from kvfs import __version__, runtime
from kvfs.config import ALWAYS, FLAGS
from kvfs.core.admin import administration
from kvfs.daemon.mount import Mount
from kvfs.errors import NotFoundError
from kvfs.tiers import Bucket, Tier


def _held(
    tier: Tier | Bucket, path: object, capacity: int = 0, reserved: int = 0, *, why: str
) -> dict[str, Any]:
    return {
        "path": str(path),
        "capacity_bytes": capacity,
        "used_bytes": tier.used,
        "reserved_bytes": reserved,
        "objects": tier.objects,
        "hits": tier.hits,
        "state": tier.health.state,
        "state_s": round(time.monotonic() - tier.health.since, 3),
        "why": why,
    }


def _bucket(mount: Mount) -> dict[str, dict[str, Any]]:
    """Return the bucket as a tier without a size, with the uploads that wait and were done."""
    bucket, dirty, hydration = mount.bucket, mount.ledger.dirty, mount.dispatcher.hydration
    if bucket is None:
        return {}
    if mount.dispatcher.prefetch is not None:
        mount.dispatcher.prefetch.expire()
    oldest = dirty.oldest_ns
    return {
        bucket.name: {
            **_held(bucket, bucket.place, why=bucket.health.why),
            "dirty_bytes": dirty.bytes,
            "dirty_objects": len(dirty),
            "dirty_most_bytes": bucket.max_dirty_bytes,
            "oldest_dirty_s": round((time.time_ns() - oldest) / 1e9, 3) if oldest else 0.0,
            "in_conflict": len(dirty.contested),
            "to_delete": len(dirty.superseded.deletes),
            "loaded": dirty.loaded,
            "errors": dict(bucket.errors),
            "streaming": 0 if hydration is None else hydration.streaming,
            **bucket.counters,
        }
    }


def _errors(mount: Mount) -> dict[str, dict[str, int]]:
    """Return the errors by operation, then by class."""
    found: dict[str, dict[str, int]] = {}
    for (operation, kind), count in mount.operations.errors.items():
        found.setdefault(operation, {})[kind] = count
    if fast := mount.ledger.counters["lookups_fast"]:
        kinds = found.setdefault("lookup", {})
        kinds[NotFoundError.__name__] = kinds.get(NotFoundError.__name__, 0) + fast
    return found


def _fast_open(mount: Mount) -> dict[str, Any]:
    on, objects, _ = mount.fast_gate.describe() if mount.fast_gate else (False, 0, 0)
    why = mount.fast_open_why or mount.ledger.namespaces.slow_opens_why
    return {"on": on and not why, "why": why, "objects": objects}


def _open_handles(mount: Mount) -> int:
    fast = mount.fast_gate.describe()[2] if mount.fast_gate else 0
    return len(mount.operations.handles) + len(mount.matches.leases) + fast


def present_options(mount: Mount) -> dict[str, str]:
    """Return the options as they are now. A remount changes flags in the kernel only."""
    entry = runtime.mount_at(mount.config.mountpoint)
    if entry is None or entry.fstype != runtime.FSTYPE:  # detached
        return mount.config.as_options()
    given = mount.config.mount_flags
    kept = [flag for flag in given if flag in entry.words]
    new = [flag for flag in FLAGS if flag in entry.words - ALWAYS and flag not in kept]
    return mount.config.as_options(kept + new)


def _state(mount: Mount) -> str:
    """Return `mounted`, `detached` or `unmounted`. The kernel ends a detached mount later."""
    if mount.session.ended:
        return "unmounted"
    at = str(mount.config.mountpoint)
    attached = any(one.path == at and one.fstype == runtime.FSTYPE for one in runtime.mounts())
    return "mounted" if attached else "detached"


def status(mount: Mount) -> dict[str, Any]:
    """Return bytes, objects, the active parts, and the reasons for the inactive ones."""
    ledger, dispatcher, config = mount.ledger, mount.dispatcher, mount.config
    ledger.fast_opens.see()
    ledger.misses.settle()
    ram = ledger.tiers.ram
    return {
        "pool": None if dispatcher.pool is None else dispatcher.pool.status(),
        "version": __version__,
        "mountpoint": str(config.mountpoint),
        "state": _state(mount),
        "identity": mount.identity,
        "daemon_pid": os.getpid(),
        "keeper_pid": mount.order["keeper_pid"] if mount.keeper_alive else 0,
        "takeovers": mount.order["takeovers"],
        "uptime_s": round(time.monotonic() - mount.started, 3),
        "passthrough": {"on": mount.backings.on, "why": mount.backings.why},
        "fast_open": _fast_open(mount),
        "huge_pages": {
            "on": ram.huge,
            "why": ram.huge_why,
        },
        "shown": {one.option: {"on": not one.why, "why": one.why} for one in mount.exporters},
        "tiers": {
            tier.name: {
                **_held(
                    *(tier, tier.root, tier.capacity, tier.reserved),
                    why="; ".join(
                        filter(None, (tier.health.why, tier.shortage, mount.room.excess(tier)))
                    ),
                ),
                "kept_bytes": ledger.accounts.kept_in(tier),
                "doubled_bytes": ledger.accounts.doubled_bytes,
                **({"began": began} if (began := ledger.accounts.began.get(tier)) else {}),
                **(tier.counters if tier is ledger.tiers.nvme else {}),
            }
            for tier in ledger.tiers.local
        }
        | _bucket(mount),
        "catalog": {
            "doubt": ledger.catalog.doubt,
            "restored": ledger.catalog.recovered.taken,
            "journal": ledger.catalog.database.journal.why,
        },
        "objects": ledger.accounts.objects,
        "without_bucket": ledger.accounts.spilled if mount.bucket is None else 0,
        "census_done": ledger.accounts.census_done.is_set(),
        "open_handles": _open_handles(mount),
        "writers": len(ledger.table.staging),
        "jobs": dispatcher.jobs,
        "writing_back": dispatcher.write_back.wanted,
        "trash": len(dispatcher.trash),
        "reclaimable_bytes": mount.room.reclaimable,
        "counters": dict(ledger.counters),
        "nvme_writes": dict(dispatcher.admission.counters),
        "scrub": dispatcher.scrub.describe(),
        "errors": _errors(mount),
        "latencies": ledger.latencies.describe(),
        **administration.summary(mount.lifecycle),
        "options": present_options(mount),
        "fitted": list(config.fitted),
    }
