"""A check of a kvfs that is not mounted: its NVMe directory, and a dead daemon's RAM tier.

Contract: the check holds the directory's lock, so that no process mounts it meanwhile. No session
begins. Without repair the check writes only the list of wrong copies (`doubts`): it opens the
catalog for reading, and reads memory without changes. Not for a mounted kvfs, whose daemon runs the
same check itself.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs import runtime
from kvfs.catalog import Catalog
from kvfs.config import bucket_place, bucket_shared
from kvfs.core.check import Finding, Survey, check
from kvfs.core.ledger import doubts
from kvfs.core.ledger.dirty import BUCKET_FACT
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.sessions import NUMBER, Past, past_sessions
from kvfs.core.ledger.tiers import Tiers
from kvfs.errors import ConfigError, KvfsError, TierError, UsageError
from kvfs.movement.movers import MoverPool
from kvfs.movement.remote import Remote
from kvfs.s3.errors import OutageError
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import Terms
from kvfs.tiers import Bucket, NvmeTier, RamTier

WORKERS = 4  # at most; more readers of whole files gain little on one device
TELL_PERIOD = 0.2  # s

TellAnswer = Callable[[dict[str, Any]], None]


def run(
    directory: Path,
    tell: TellAnswer,
    *,
    repair: bool,
    hashes: bool,
    bucket: bool = False,
    options: str = "",
) -> None:
    """Check it, and tell findings and progress in the form in which a daemon answers.

    bucket: check the bucket as well. `options` are mount options for its place, and for whether
    other nodes use it. Raises InUseError, ConfigError and other KvfsErrors if the check is
    impossible.
    """
    with held(directory, "fsck", read_only=not repair) as (nvme, catalog):
        there = None
        if bucket or options:  # the check only reads it, so it is no tier here
            place = place_of(nvme, catalog, options)
            if catalog.fact(BUCKET_FACT) is None:
                raise _no_bucket(nvme)
            shared = bucket_shared(options)
            there = Bucket(place, Terms(), most=0, delay=0, wait=0, shared=shared)
        trio.run(partial(_run, nvme, catalog, tell, there, repair=repair, hashes=hashes))


@contextmanager
def held(directory: Path, who: str, *, read_only: bool) -> Iterator[tuple[NvmeTier, Catalog]]:
    """Give the tier and catalog of an unmounted kvfs; no process mounts it meanwhile.

    `who`: the command that asks. Raises InUseError, ConfigError.
    """
    nvme = NvmeTier(directory, 0)
    try:
        nvme.write_holder(f"process {os.getpid()}, kvfs {who}")
        catalog = Catalog(directory / "catalog", read_only=read_only)
        try:
            yield nvme, catalog
        finally:
            catalog.close()
    finally:
        nvme.close()


def place_of(nvme: NvmeTier, catalog: Catalog, options: str) -> BucketPlace:
    """Return the place of its bucket: that of `options`, which must not differ. ConfigError."""
    known = catalog.fact(BUCKET_FACT)
    place = bucket_place(options, known)
    if place is None:
        raise _no_bucket(nvme)
    if known is not None and str(place) != known:
        raise UsageError(f"s3={place}: the objects of {nvme.root} are in {known}: give that place")
    return place


def _no_bucket(nvme: NvmeTier) -> UsageError:
    return UsageError(f"{nvme.root} was never mounted with s3=: leave --bucket out")


async def _run(
    nvme: NvmeTier,
    catalog: Catalog,
    tell: TellAnswer,
    bucket: Bucket | None,
    *,
    repair: bool,
    hashes: bool,
) -> None:
    ledger = _ledger(nvme, catalog)
    if repair and catalog.doubt and ledger.tiers.ram.mounted:  # the next mount is to find it
        with catalog.batch() as batch:
            batch.set_fact("ram_epoch", str(ledger.tiers.ram.epoch))
    findings: list[Finding] = []

    async def found(finding: Finding) -> None:
        findings.append(finding)
        await trio.lowlevel.checkpoint()

    def say(*, ended: bool) -> None:
        tell(survey.answer(findings, ended=ended, failed=""))
        findings.clear()

    async def keep_telling() -> None:
        while True:
            say(ended=False)
            await trio.sleep(TELL_PERIOD)

    workers = min(WORKERS, os.cpu_count() or 1)
    async with MoverPool.open(workers, Counter[str]()) as movers:
        remote = None if bucket is None else Remote(movers, bucket)
        survey = Survey(
            *(ledger, movers, set(), found), repair=repair, hashes=hashes, live=False, remote=remote
        )
        failure: KvfsError | OSError | None = None  # a nursery would put it into a group
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_telling)
            try:
                await check(survey)
                for trash in ledger.trash.files:
                    await trio.to_thread.run_sync(trash.remove)
            except (KvfsError, OSError) as error:
                failure = error
            nursery.cancel_scope.cancel()
    say(ended=failure is None)
    if failure is not None:
        cure = f"; {bucket.place.cure}" if bucket and isinstance(failure, OutageError) else ""
        raise TierError(f"{nvme.root}: the check cannot go on: {failure}{cure}") from failure


def _ledger(nvme: NvmeTier, catalog: Catalog) -> Ledger:
    """Return the ledger as the next mount would find it, without accounts."""
    try:
        past = past_sessions(catalog)
    except ConfigError:  # the check will find and report it
        past = Past(last=0, ended=0, same_mount=True, low=1, high=0)
    ledger = Ledger(
        catalog,
        Tiers(_memory(nvme.identity, catalog), nvme),
        session=past.last,
        suspect=range(past.low, past.high + 1),
        invalidate_name=lambda _parent, _name, _ino: None,
    )
    ledger.accounts.first_new = catalog.counter
    doubts.load(ledger.records)
    return ledger


def _memory(identity: str, catalog: Catalog) -> RamTier | None:
    """Return the RAM tier, if its daemon was killed and the machine has not gone down since."""
    known = catalog.fact("ram_epoch") or ""
    if not (catalog.doubt or NUMBER.fullmatch(known)):
        return None
    epoch = None if catalog.doubt else int(known)  # else memory stays as it is
    root = runtime.ram_path(identity)
    try:
        return RamTier(root, 0, identity=identity, epoch=epoch, huge=None)
    except ConfigError:
        return None  # it is gone, as after an unmount
