"""What is asked of the daemon on its control socket.

Contract: handlers raise KvfsError with the reason, and change nothing then; none blocks. Those for
namespaces are in `administration`, those for checks in `check`.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvfs import failpoints
from kvfs.control.server import Handler
from kvfs.core.admin import administration
from kvfs.core.admin.visitors import Pins, Usage
from kvfs.core.bucket.node import describe
from kvfs.core.jobs.sweeps import Sweeps
from kvfs.core.jobs.warm import Warm
from kvfs.daemon import inspection
from kvfs.daemon.mount import Mount
from kvfs.daemon.status import status
from kvfs.errors import ConfigError, ControlError

PATIENCE = 5.0  # s that uploads do not wait after somebody last asked for them
DISCARD_PATIENCE = 60.0  # s between an order not to write back and the unmount

T = TypeVar("T")


def contents(mount: Mount) -> Mapping[bytes, Callable[[], bytes]]:
    """Of the control files, by name."""

    def line(found: object, indent: int | None = None) -> bytes:
        return json.dumps(found, indent=indent).encode() + b"\n"

    return {
        b"config": lambda: line(mount.config.as_options(), 2),
        b"events": lambda: b"".join(map(line, mount.events.listed())),
        b"stats": lambda: line(status(mount), 2),
    }


def handlers(mount: Mount) -> Mapping[str, Handler]:
    """By verb."""

    def bucketed(found: T | None) -> T:
        if found is None:
            raise ControlError(f"{mount.config.mountpoint} has no bucket: mount it with s3=")
        return found

    async def show() -> dict[str, Any]:
        return status(mount)

    async def stat(ino: int = 0, path: str = "") -> dict[str, Any]:
        """One file or directory, by its number or by its path below the mount point."""
        return inspection.describe(mount, ino or inspection.find(mount, path).ino)

    async def events() -> dict[str, Any]:
        """What happened lately, the oldest first: `kvfs.daemon.events`."""
        return {"events": mount.events.listed()}

    async def change(**options: str) -> dict[str, Any]:
        """Change hot options. Raises ConfigError and changes nothing if one is refused."""
        await mount.live.change(options)
        mount.ledger.work.wake()
        return {}

    async def write_back() -> dict[str, Any]:
        size, objects = mount.dispatcher.write_back.start()
        stuck = f"NVMe takes none ({why})" if (why := mount.dispatcher.write_back.stuck) else ""
        spill = mount.dispatcher.spill
        if spill is not None and (more := spill.stranded())[1]:
            spill.dirty.hurry(PATIENCE)
            size, objects = size + max(1, more[0]), objects + more[1]
            if spill.bucket.health.down:
                stuck = stuck or f"{spill.bucket.place} takes none ({spill.bucket.health.why})"
        return {
            "bytes_left": size,
            "objects_left": objects,
            "stuck": stuck,
            "too_large": mount.dispatcher.write_back.too_large,
        }

    async def flush() -> dict[str, Any]:
        """Upload what waits for its time, and say what is left."""
        spill = bucketed(mount.dispatcher.spill)
        spill.dirty.hurry(PATIENCE)
        contests = mount.dispatcher.contests
        if contests is not None:
            contests.hurry()
        health = spill.bucket.health
        # What is found to be in conflict no more is to go up as well.
        asking = contests is not None and contests.hurrying and not health.down
        return {
            "bytes_left": spill.dirty.bytes,
            "objects_left": len(spill.dirty),
            "done": sum(spill.bucket.counters[name] for name in ("uploads", "copies", "conflicts")),
            "loaded": spill.dirty.loaded and not asking,
            "down": health.why or "it does not answer" if health.down else "",
            "place": str(spill.bucket.place),
        }

    async def import_(paths: list[str], again: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002 (arguments come by name)
        """Begin to give what the bucket has below these paths names here."""
        return await bucketed(mount.dispatcher.importing).start(paths, again=again)

    async def imported() -> dict[str, Any]:
        return await bucketed(mount.dispatcher.importing).look()

    async def warm(inos: list[int]) -> dict[str, Any]:
        """Bring files, and all below directories, to their fastest tier."""
        return {"job": mount.dispatcher.warm.start(inos)}

    def looked_at(jobs: Warm | Sweeps, what: str) -> Handler:
        """How far a job is. A daemon that took over knows nothing of it."""

        async def look(job: int, cancel: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
            if cancel:
                jobs.cancel(job)
            found = jobs.look(job)
            if found is None:
                raise ControlError(
                    f"{what} {job} is not known any more: its daemon was replaced; ask for it again"
                )
            return found

        return look

    async def evict(
        inos: list[int],
        to: str = "",
        drop: bool = False,  # noqa: FBT001, FBT002
        dry: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[str, Any]:
        """Have files, and all below directories, leave tiers."""
        return {"job": mount.dispatcher.evict(inos, to=to, drop=drop, dry=dry)}

    async def pin(inos: list[int], on: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Pin files, and all that are below directories now, or end that."""
        return {"job": mount.dispatcher.sweeps.start(inos, Pins(mount.ledger, on=on))}

    async def usage(inos: list[int]) -> dict[str, Any]:
        """Count what files, and all below directories, take."""
        return {"job": mount.dispatcher.sweeps.start(inos, Usage(mount.ledger))}

    async def bucket_claims(after: int) -> dict[str, Any]:
        """What this node has in the bucket; again from `after` on, until that is 0."""
        found = mount.bucket
        if found is None:
            raise ConfigError(f"{mount.config.mountpoint} has no bucket: mount it with s3=")
        namespaces = mount.ledger.namespaces
        return await describe(namespaces, found, mount.identity, mount.notes, after)

    async def arm(faults: str) -> dict[str, Any]:
        """For tests: fail points of this daemon; says what was passed since the last time."""
        passed = dict(failpoints.passed)
        failpoints.arm(faults)
        return {"passed": passed}

    async def discard_ram(*, on: bool, lasting: bool = False) -> dict[str, Any]:
        """Do not write back at the next unmount, if that comes soon or the order is lasting."""
        patience = float("inf") if lasting else DISCARD_PATIENCE
        mount.discard(time.monotonic() + patience if on else 0.0)
        return {}

    return {
        **administration.handlers(mount.lifecycle),
        "status": show,
        "stat": stat,
        "events": events,
        "set": change,
        "write_back": write_back,
        "flush": flush,
        "import": import_,
        "imported": imported,
        "warm": warm,
        "warmed": looked_at(mount.dispatcher.warm, "warming"),
        "evict": evict,
        "pin": pin,
        "usage": usage,
        "swept": looked_at(mount.dispatcher.sweeps, "job"),
        "objects": mount.ranking.objects,
        "bucket_claims": bucket_claims,
        "discard_ram": discard_ram,
        "check": mount.dispatcher.checks.start,
        "checked": mount.dispatcher.checks.look,
        "arm": arm,
    }
