"""Garbage collection of a bucket's prefix, in the process of the command that requests it.

Contract: the daemon tells which objects this node has in the bucket. For a kvfs that is not
mounted, the catalog tells it, while its directory is locked. Without either, only the records of
nodes tell which objects are in use. Nothing is written to a catalog. Not for the rules:
`kvfs.s3.garbage`.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvfs.catalog import Catalog
from kvfs.config import bucket_place
from kvfs.control import request
from kvfs.core.bucket.node import spaces, strays_after
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.errors import ConfigError
from kvfs.fsck import held, place_of
from kvfs.movement import publishing, stores
from kvfs.s3 import marker
from kvfs.s3.collection import Collector, Report, Tally, TellProgress
from kvfs.s3.errors import NoBucketError, OutageError, RefusedError
from kvfs.s3.garbage import Own
from kvfs.s3.keys import Keys, Space
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import Terms
from kvfs.tiers import NvmeTier

FactsOfNode = Callable[[], Own]


def run(
    target: Path | None,
    options: str,
    tell: TellProgress,
    *,
    mounted: bool,
    older_than: float,
    node_age: float,
    forget: Collection[str],
    delete: bool,
    all_recorded: bool,
) -> dict[str, Any]:
    """Look, and delete if told to; return the findings and the deletions, as plain values.

    target: a mount point, or an NVMe directory; None: `options` have the place of the bucket, as
    for a mount. Raises ConfigError and deletes nothing if it is not known which objects are in use;
    StoreError.
    """
    with _node(target, options, mounted=mounted) as (place, look):
        keys = Keys(place.prefix)
        transfers = stores.transfers(place, Terms())
        try:
            found = marker.read(transfers, keys)
            if found is None:
                transfers.store.clock()  # tells whether there is a bucket at all
        except OutageError as error:
            raise OutageError(f"{error}; {place.cure}") from error
        except NoBucketError as error:
            raise ConfigError(f"{error}: give the bucket of the mounts") from error
        except RefusedError as error:
            raise ConfigError(f"{error}: give credentials that may read the bucket") from error
        if found is None:
            raise ConfigError(
                f"{place}: has no {keys.own}format.json, expected the prefix of a mount"
            )
        if found.owner not in {"", look().identity}:
            raise ConfigError(f"{place}: belongs to kvfs {found.owner} alone: run kvfs gc there")
        collector = Collector(
            *(transfers, keys, look),
            older_than=older_than,
            node_age=node_age,
            forget=forget,
            tell=tell,
        )
        report = collector.look()
        if delete:
            collector.check(report, all_recorded=all_recorded)
            collector.delete(report)
        return _as_json(place, report, collector.forget, delete=delete)


@contextmanager
def _node(
    target: Path | None, options: str, *, mounted: bool
) -> Iterator[tuple[BucketPlace, FactsOfNode]]:
    """Give the place of the bucket, and a function that looks at this node's objects there."""
    if target is None:
        place = bucket_place(options)
        if place is None:
            raise ConfigError("no bucket: give MOUNTPOINT, an NVMe directory, or -o s3=")
        yield place, Own
    elif mounted:
        if options:
            raise ConfigError(f"{target} is mounted, and knows its bucket: leave -o out")
        yield _of_mount(target)
    else:
        with held(target, "gc", read_only=True) as (nvme, catalog):
            if catalog.recovered.taken or catalog.doubt:
                raise ConfigError(
                    f"catalog {catalog.path} lacks its newest changes, and with them the objects "
                    f"in use: run kvfs fsck --repair {target} first"
                )
            yield _of_catalog(nvme, catalog, options)


def _of_mount(mountpoint: Path) -> tuple[BucketPlace, FactsOfNode]:
    first = request(mountpoint, "bucket_claims", after=0)
    strays, more = set(first["strays"]), first
    while after := more["after"]:
        more = request(mountpoint, "bucket_claims", after=after)
        strays.update(more["strays"])

    def look() -> Own:
        # Earlier strays count too: this node's record keeps objects that became strays since.
        now = request(mountpoint, "bucket_claims", after=0)
        has = frozenset(space for text in now["namespaces"] if (space := Space.parse(text)))
        ids = publishing.ids_noted(now["notes"])
        return Own(now["identity"], has, frozenset(strays.union(now["strays"])), ids)

    return BucketPlace(**first["place"]), look


def _of_catalog(nvme: NvmeTier, catalog: Catalog, options: str) -> tuple[BucketPlace, FactsOfNode]:
    """Read everything now: the directory is locked, so nothing changes."""
    place = place_of(nvme, catalog, options)
    has = spaces(Namespaces(catalog))
    strays: list[str] = []
    after = 0
    while True:
        more, after = strays_after(catalog, Keys(place.prefix), has, after)
        strays += more
        if not after:
            break
    ids = publishing.ids_noted(str(nvme.root / "uploads"))
    own = Own(nvme.identity, has, frozenset(strays), ids)
    return place, lambda: own


def _as_json(
    place: BucketPlace, report: Report, forgotten: Collection[str], *, delete: bool
) -> dict[str, Any]:
    def tallies(found: dict[str, Tally]) -> dict[str, Any]:
        return {kind: asdict(tally) for kind, tally in sorted(found.items())}

    return {
        "place": str(place),
        "nodes": [
            {
                "identity": node.identity,
                "host": node.host,
                "mountpoint": node.mountpoint,
                "age_s": round(report.now - node.refreshed, 1),
                "stale": node.identity in report.stale,
                "forgotten": node.identity in forgotten,
                "namespaces": sorted(map(str, node.has)),
            }
            for node in report.nodes
        ],
        "unread": report.unread,
        "listed": asdict(report.listed),
        "kept": tallies(report.kept),
        "garbage": tallies(report.garbage),
        "namespaces": [
            {
                "name": str(space),
                "kind": found.kind,
                "explained": found.explained,
                "recent": found.recent,
                **asdict(found.tally),
            }
            for space, found in sorted(report.spaces.items())
        ],
        "withheld": tallies(report.withheld),
        "examples": report.examples,
        "delete": delete,
        "deleted": asdict(report.deleted),
        "failures": report.failures,
        "failed": report.failed,
    }
