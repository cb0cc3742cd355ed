"""The verbs of the daemon's control socket.

Contract: handlers raise KvfsError with the reason, and then change nothing; none blocks. Those for
namespaces are in `administration`, those for checks in `check`.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvfs import failpoints
from kvfs.control.client import DISREGARDED
from kvfs.control.server import VerbHandler
from kvfs.core.admin import administration
from kvfs.core.admin.visitors import Pins, Usage
from kvfs.core.bucket.node import describe
from kvfs.core.jobs.tree_jobs import TreeJobs
from kvfs.core.jobs.warm import Warm
from kvfs.daemon import inspection
from kvfs.daemon.mount import Mount
from kvfs.daemon.status import present_options, status
from kvfs.errors import ConfigError, ControlError

PATIENCE = 5.0  # s after a request to upload, during which uploads do not wait
DISCARD_PATIENCE = 60.0  # s between an order not to write back and the unmount

T = TypeVar("T")


def contents(mount: Mount) -> Mapping[bytes, Callable[[], bytes]]:
    """Return the contents of the control files, by name."""

    def line(found: object, indent: int | None = None) -> bytes:
        return json.dumps(found, indent=indent).encode() + b"\n"

    return {
        b"config": lambda: line(present_options(mount), 2),
        b"events": lambda: b"".join(map(line, mount.events.listed())),
        b"stats": lambda: line(status(mount), 2),
    }


def handlers(mount: Mount) -> Mapping[str, VerbHandler]:
    """Return the handlers by verb."""

    def bucketed(found: T | None) -> T:
        if found is None:
            raise ConfigError(f"{mount.config.mountpoint} has no bucket: mount it with s3=")
        return found

    async def show() -> dict[str, Any]:
        return status(mount)

    async def stat(ino: int = 0, path: str = "") -> dict[str, Any]:
        """Describe one file or directory, by its number or by its path below the mount point."""
        found = inspection.describe(mount, ino or inspection.find(mount, path).ino)
        return found | await inspection.elsewhere(mount, found["ino"])

    async def events(count: int = 0) -> dict[str, Any]:
        """Return the latest events, the oldest first: `kvfs.daemon.events`. 0: all of them."""
        return {"events": mount.events.listed()[-count:]}

    async def disregard(process: int) -> dict[str, Any]:
        """Count no lookup of the client as a miss for a while: it is a command of kvfs."""
        mount.ledger.misses.disregard(process, DISREGARDED)
        return {}

    async def change(**options: str) -> dict[str, Any]:
        """Change hot options. Raises ConfigError and changes nothing if one is refused.

        Returns the values of the given options before and now; an option without one is left out.
        """
        before, now = (await mount.live.change(options)).as_options(), mount.config.as_options()
        mount.ledger.wakeup.wake()
        return {
            "before": {name: before[name] for name in options if name in before},
            "now": {name: now[name] for name in options if name in now},
        }

    async def write_back() -> dict[str, Any]:
        size, objects = mount.dispatcher.write_back.start()
        stuck = f"NVMe takes none ({why})" if (why := mount.dispatcher.write_back.stuck) else ""
        uploader = mount.dispatcher.uploader
        if uploader is not None and (more := uploader.stranded())[1]:
            uploader.dirty.hurry(PATIENCE)
            size, objects = size + max(1, more[0]), objects + more[1]
            if uploader.bucket.health.down:
                stuck = (
                    stuck or f"{uploader.bucket.place} takes none ({uploader.bucket.health.why})"
                )
        return {
            "bytes_left": size,
            "objects_left": objects,
            "stuck": stuck,
            "displaced": mount.dispatcher.write_back.displaced,
            "lost": lost(),
        }

    def lost() -> dict[str, Any]:
        """Return what would be lost with RAM now. It is too little before the census is done."""
        accounts = mount.ledger.accounts
        return {
            "objects": accounts.only_ram_objects,
            "bytes": accounts.only_ram_bytes,
            "too_large": mount.dispatcher.write_back.too_large,
            "pool": mount.dispatcher.pool is not None,
            "census_done": accounts.census_done.is_set(),
        }

    async def flush() -> dict[str, Any]:
        """Upload all dirty objects without their delay, and return the amount still to go."""
        uploader = bucketed(mount.dispatcher.uploader)
        uploader.dirty.hurry(PATIENCE)
        contests = mount.dispatcher.contests
        if contests is not None:
            contests.hurry()
        health = uploader.bucket.health
        # An object found to be in conflict no more is uploaded as well.
        asking = contests is not None and contests.hurrying and not health.down
        return {
            "bytes_left": uploader.dirty.bytes,
            "objects_left": len(uploader.dirty),
            "done": sum(
                uploader.bucket.counters[name] for name in ("uploads", "copies", "conflicts")
            ),
            "loaded": uploader.dirty.loaded and not asking,
            "down": health.why or "it does not answer" if health.down else "",
            "place": str(uploader.bucket.place),
        }

    async def pool(conflicts: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 (arguments come by name)
        """Describe the pool: this node's part, and all nodes that the index knows.

        conflicts: with the objects here whose names other nodes have.
        """
        if mount.dispatcher.pool is None:
            raise ConfigError(f"{mount.config.mountpoint} has no pool: mount it with pool=")
        return await mount.dispatcher.pool.describe(with_conflicts=conflicts)

    async def import_(paths: list[str], again: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 (arguments come by name)
        """Begin to give the bucket's objects below these paths names on this mount."""
        return await bucketed(mount.dispatcher.importing).start(paths, again=again)

    async def imported() -> dict[str, Any]:
        return await bucketed(mount.dispatcher.importing).look()

    async def warm(inos: list[int]) -> dict[str, Any]:
        """Bring files, and all below directories, to their fastest tier."""
        return {"job": mount.dispatcher.warm.start(inos)}

    def looked_at(jobs: Warm | TreeJobs, what: str) -> VerbHandler:
        """Return a handler for a job's progress. A daemon that took over does not know the job."""

        async def look(job: int, cancel: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
            if cancel:
                jobs.cancel(job)
            found = jobs.look(job)
            if found is None:
                raise ControlError(f"{what} {job} is lost: its daemon was replaced; start it again")
            return found

        return look

    async def evict(
        inos: list[int],
        to: str = "",
        drop: bool = False,  # noqa: FBT001, FBT002
        dry: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[str, Any]:
        """Evict files, and all below directories, from tiers."""
        return {"job": mount.dispatcher.evict(inos, to=to, drop=drop, dry=dry)}

    async def pin(inos: list[int], on: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Pin files, and all that are below directories now, or end that."""
        return {"job": mount.dispatcher.tree_jobs.start(inos, Pins(mount.ledger, on=on))}

    async def usage(inos: list[int]) -> dict[str, Any]:
        """Count the bytes of files, and of all below directories."""
        return {"job": mount.dispatcher.tree_jobs.start(inos, Usage(mount.ledger))}

    async def bucket_claims(after: int) -> dict[str, Any]:
        """Return this node's objects in the bucket after `after`; repeat until that is 0."""
        found = bucketed(mount.bucket)
        namespaces = mount.ledger.namespaces
        return await describe(namespaces, found, mount.identity, mount.notes, after)

    async def arm(faults: str) -> dict[str, Any]:
        """Arm fail points of this daemon, for tests; return those passed since the last time."""
        passed = dict(failpoints.passed)
        failpoints.arm(faults)
        return {"passed": passed}

    async def discard_ram(*, on: bool, lasting: bool = False) -> dict[str, Any]:
        """Do not write back at the next unmount, if that comes soon or the order is lasting.

        Returns the amount that would be lost.
        """
        patience = float("inf") if lasting else DISCARD_PATIENCE
        mount.discard(time.monotonic() + patience if on else 0.0)
        return lost()

    return {
        **administration.handlers(mount.lifecycle),
        "status": show,
        "stat": stat,
        "events": events,
        "disregard": disregard,
        "set": change,
        "write_back": write_back,
        "flush": flush,
        "pool": pool,
        "import": import_,
        "imported": imported,
        "warm": warm,
        "warmed": looked_at(mount.dispatcher.warm, "warming"),
        "evict": evict,
        "pin": pin,
        "usage": usage,
        "swept": looked_at(mount.dispatcher.tree_jobs, "job"),
        "objects": mount.ranking.objects,
        "bucket_claims": bucket_claims,
        "discard_ram": discard_ram,
        "check": mount.dispatcher.checks.start,
        "checked": mount.dispatcher.checks.look,
        "arm": arm,
    }
