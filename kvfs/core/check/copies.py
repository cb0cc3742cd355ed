"""Check backing files against the records that mean them.

Contract: `run` looks at every copy that a sealed object's record claims. It looks at a suspect
again with the inode held, so that no open, move or eviction comes between the record and the file,
and only then reports it. A damaged copy goes into quarantine and out of the record. With the last
copy the object goes, with its names. Movers read the bytes, and only if hashes are wanted. Objects
that are being written are skipped.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple

import trio

from kvfs.catalog import Inode, keys
from kvfs.compression.container import DamagedError
from kvfs.core.check.survey import Survey
from kvfs.core.ledger import doubts
from kvfs.errors import KvfsError
from kvfs.movement.movers import SourceChangedError
from kvfs.tiers import Tier

BATCH = 64  # objects whose files one thread looks at
# Bytes that a copy may take beyond its record: file systems differ in what they need beside data.
SLACK = 8192

UNREADABLE = {errno.EIO, errno.EUCLEAN, errno.ENODATA, errno.EBADMSG}  # the device's own errors

Stat = os.stat_result | OSError | None  # None: there is no file


class CopyFault(NamedTuple):
    """A fault of a copy. `remedy`: the copy goes, or its record or time is corrected.

    "plain": the copy is plain, but the record says that it is packed.
    """

    kind: str
    what: str
    remedy: str  # "lose", "restamp", "recount", "plain", or "" if the fault is not certain


Hashed = bytes | CopyFault | None  # the digest, or why there is none; None: not read


class CopyCheck:
    """Checks copies. `lost` are tiers whose directory is gone: their copies cannot be checked."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.catalog = survey.catalog
        self.ledger = survey.ledger
        self.lost: set[Tier] = set()
        beside = max(1, survey.movers.workers // 2)  # writers come first
        self._hashing = trio.CapacityLimiter(beside if survey.live else survey.movers.workers)

    async def look_for_tiers(self) -> None:
        """Report tiers whose directory is gone, which is no damage of the copies in them."""
        survey = self.survey
        for tier in self.ledger.tiers.local:
            if tier not in self.lost and not await survey.io(partial(_there, tier)):
                self.lost.add(tier)
                what = f"the {tier.name} tier's directory {tier.root} is not what it was"
                cure = "none: give its file system back, or mount anew"
                survey.report("tier", 0, str(tier.root), what, cure, None)
        await survey.step(0)

    async def run(self) -> None:
        survey = self.survey
        survey.begin("copies", survey.bytes if survey.hashes else survey.inodes)
        records = self.catalog.records(keys.INODES)
        while batch := list(islice(records, BATCH)):
            inos = [ino for key, _ in batch if (ino := keys.number(key))]
            # This part ignores links, directories and unfinished objects.
            inodes = [inode for ino in inos if (inode := self._fit(ino))]
            await self._look(inodes)
            await survey.step(0 if survey.hashes else len(batch))

    def _fit(self, ino: int, version: int | None = None) -> Inode | None:
        """Return the object if it is sealed, has a name and no writer; else None."""
        inode, held = self.survey.sealed(ino), self.ledger.table.open.get(ino)
        if inode is None or (held is not None and held.writers):
            return None
        return inode if version in {None, inode.version} else None

    def _holders(self, inode: Inode) -> list[Tier]:
        return [tier for tier in self.ledger.tiers.holders(inode) if tier not in self.lost]

    async def _look(self, inodes: list[Inode]) -> None:
        survey = self.survey
        copies = [(inode, tier) for inode in inodes for tier in self._holders(inode)]
        paths = [tier.path(inode.ino, inode.version) for inode, tier in copies]
        found = await survey.io(partial(_stat_all, paths))
        suspects: dict[int, None] = {}
        sound: list[tuple[Inode, Tier]] = []
        for (inode, tier), status in zip(copies, found, strict=True):
            if self._verdict(inode, tier, status, None):
                suspects[inode.ino] = None
            else:
                sound.append((inode, tier))
                self._note(inode, tier)
        nowhere = [one for one in inodes if not (one.in_bucket or self.ledger.tiers.holders(one))]
        suspects |= {inode.ino: None for inode in nowhere}
        if survey.hashes:
            async with trio.open_nursery() as nursery:
                for inode, tier in sound:
                    await self._hashing.acquire_on_behalf_of((inode.ino, tier))
                    nursery.start_soon(self._read, inode, tier, suspects)
        for ino in suspects:
            await self._judge(ino)
            await survey.step(0)
        if suspects and survey.hashes:
            doubted = doubts.listed(self.ledger.records)
            await survey.io(partial(doubts.save, self.ledger.records, doubted))

    def _note(self, inode: Inode, tier: Tier) -> None:
        notes = self.survey.notes
        notes["copies"] += 1
        if self._suspect(inode, tier) and not self.survey.hashes:
            notes["to_verify"] += 1

    async def _read(self, inode: Inode, tier: Tier, suspects: dict[int, None]) -> None:
        """Compare a copy that looks sound with its digest, or give the object its digest."""
        survey, sparse = self.survey, inode.sparse
        try:
            hashed: Hashed = await self._hash(inode, tier)
        finally:
            self._hashing.release_on_behalf_of((inode.ino, tier))
        path = tier.path(inode.ino, inode.version)
        (status,) = await survey.io(partial(_stat_all, [path]))
        current = self._fit(inode.ino, inode.version)
        if current is not None and current.sparse != sparse:
            hashed = None  # it got a digest of the other kind meanwhile
        if current is not None and tier in self.ledger.tiers.holders(current):
            if self._verdict(current, tier, status, hashed):
                suspects[inode.ino] = None
            elif isinstance(hashed, bytes):
                self._take_digest(current, tier, hashed)
        await survey.step(inode.data)

    async def _hash(self, inode: Inode, tier: Tier, *, plain: bool = False) -> Hashed:
        """Read a copy for its digest. plain: read it as plain even if the record says packed."""
        path = tier.path(inode.ino, inode.version)
        try:
            if inode.packed is not None and tier is self.ledger.tiers.nvme and not plain:
                movers = self.survey.movers
                return await movers.unpacked_digest(path, inode.packed, inode.size)
            found = await self.survey.movers.read_through(
                path, inode.size, sync=False, sparse=inode.sparse, data=inode.data
            )
        except (SourceChangedError, DamagedError) as error:
            return CopyFault("damaged", str(error), "lose")
        except (OSError, KvfsError) as error:
            bad = isinstance(error, OSError) and error.errno in UNREADABLE
            return CopyFault("unread", f"it cannot be read: {error}", "lose" if bad else "")
        return found.digest

    def _take_digest(self, inode: Inode, tier: Tier, digest: bytes) -> None:
        """Record the digest of a copy in which no fault was found."""
        survey = self.survey
        verified = bool(inode.digest)
        survey.notes["verified" if verified else "without_digest"] += 1
        if verified and tier is self.ledger.tiers.nvme:
            self.ledger.verified.note(inode.ino)
        trusted = verified and survey.live and self._suspect(inode, tier)
        if survey.repair and (trusted or not verified):
            inode.digest = digest
            if trusted:
                inode.session = self.ledger.session
            survey.put(inode)

    # Faults of a copy

    def _suspect(self, inode: Inode, tier: Tier) -> bool:
        """Whether a power loss may have come between the bytes and the disk."""
        return tier is self.ledger.tiers.nvme and inode.session in self.ledger.suspect

    def _verdict(self, inode: Inode, tier: Tier, found: Stat, hashed: Hashed) -> CopyFault | None:
        if found is None:
            return CopyFault("missing", "it is not there", "lose")
        if isinstance(found, OSError):
            return CopyFault("unread", f"nothing can be said of it: {found}", "")
        if not stat.S_ISREG(found.st_mode):
            return CopyFault("damaged", "it is no regular file", "lose")
        packed = inode.packed if tier is self.ledger.tiers.nvme else None
        form = inode if packed is None else packed
        plain = packed is not None and found.st_size == inode.size
        if found.st_size != form.size and not plain:
            what = f"it has {found.st_size} bytes, expected {form.size}"
            return CopyFault("damaged", what, "lose")
        if isinstance(hashed, CopyFault):
            return hashed
        if hashed is not None and inode.digest and hashed != inode.digest:
            return CopyFault("damaged", "its bytes do not have their digest", "lose")
        if found.st_mtime_ns != inode.backing_mtime_ns:
            what = f"it was changed at {found.st_mtime_ns} ns, expected {inode.backing_mtime_ns}"
            if not inode.digest:
                return CopyFault("touched", f"{what}; there is no digest to tell its bytes", "lose")
            if hashed is None:
                return CopyFault(
                    "touched", f"{what}; --hashes can tell whether its bytes are right", ""
                )
            return CopyFault("touched", f"{what}; its bytes have their digest", "restamp")
        if self._suspect(inode, tier) and not inode.digest and self.survey.hashes:
            what = "it was last written before a power loss, and has no digest to tell its bytes"
            return CopyFault("unproven", what, "lose")
        if plain:
            return CopyFault("unpacked", "it was decompressed, and the record lacks that", "plain")
        if found.st_blocks * 512 > form.blocks * 512 + SLACK:
            what = f"it takes {found.st_blocks} blocks, accounted are {form.blocks}"
            return CopyFault("blocks", what, "recount")
        return None

    async def _judge(self, ino: int) -> None:
        """Look at all copies of a suspect again, with its inode held."""
        survey, ledger = self.survey, self.ledger
        async with survey.hold(ino):
            inode = self._fit(ino)
            if inode is None or survey.to_be_recovered(ino):
                return
            version = inode.version
            if not ledger.tiers.holders(inode):
                if not inode.in_bucket and not inode.in_pool:
                    self._nowhere(inode)
                return
            await self.look_for_tiers()  # is one copy gone, or all?
            holders = self._holders(inode)
            paths = [tier.path(ino, version) for tier in holders]
            found = await survey.io(partial(_stat_all, paths))
            verdicts: list[tuple[Tier, Stat, CopyFault]] = []
            for tier, status in zip(holders, found, strict=True):
                verdict = self._verdict(inode, tier, status, None)
                hopeless = verdict is not None and verdict.remedy == "lose"
                if survey.hashes and not hopeless:
                    plain = verdict is not None and verdict.remedy == "plain"
                    hashed = await self._hash(inode, tier, plain=plain)
                    verdict = self._verdict(inode, tier, status, hashed)
                if verdict is not None and (tier.name, ino, version) not in survey.said:
                    verdicts.append((tier, status, verdict))
            current = self._fit(ino, version)
            if current is None or self._holders(current) != holders:
                return  # unlinked meanwhile
            doomed = [tier for tier, _, verdict in verdicts if verdict.remedy == "lose"]
            lost = doomed == ledger.tiers.holders(current) and not current.in_bucket
            for tier, status, verdict in verdicts:
                last = lost and tier is doomed[-1]
                await self._report(current, tier, status, verdict, last=last)

    def _nowhere(self, inode: Inode) -> None:
        """Handle an object without a copy: it was only in RAM, which is gone, or is damaged."""
        if inode.ram_epoch and not self.survey.live:
            self.survey.notes["ram_gone"] += 1
            return
        is_open = inode.ino in self.ledger.table.open
        drop = None if is_open else partial(self.ledger.removals.drop, inode, "lost")
        what = "it is sealed, but no tier holds a copy"
        self.survey.report_inode("lost", inode, what, "drop it with its names", drop)

    # Repair

    async def _report(
        self, inode: Inode, tier: Tier, status: Stat, verdict: CopyFault, *, last: bool
    ) -> None:
        """Mend a fault and report it. `last`: no other copy is left."""
        survey, ino, version = self.survey, inode.ino, inode.version
        path = tier.path(ino, version)
        there = status if isinstance(status, os.stat_result) else None
        what = f"{tier.name} copy {path}: {verdict.what}"
        cure = {
            "lose": "forget this copy" if there is None else "put this copy into quarantine",
            "restamp": "set the time back to what it was",
            "recount": "correct the record",
            "plain": "correct the record",
            "": "none while that cannot be told",
        }[verdict.remedy]
        if last:
            cure += " and drop the object with its names"
        mend: Callable[[], object] | None = None
        if verdict.remedy == "lose" and there is None and ino in self.ledger.table.open:
            cure = "none while it is open"
        elif verdict.remedy:
            mend = partial(self._mend, ino, version, tier, there, verdict.remedy)
        names = survey.path(inode)
        if survey.repair and verdict.remedy == "restamp" and there is not None:
            times = (there.st_atime_ns, inode.backing_mtime_ns)
            await survey.io(partial(os.utime, path, ns=times))
        if verdict.kind == "damaged" and not survey.repair and (now := self._fit(ino, version)):
            self.ledger.records.distrust(now, tier)
        survey.report(verdict.kind, ino, names, what, cure, mend)

    def _mend(
        self, ino: int, version: int, tier: Tier, there: os.stat_result | None, remedy: str
    ) -> None:
        ledger, inode = self.ledger, self._fit(ino, version)
        if inode is None:
            return  # its last name went with another copy, or meanwhile
        if remedy == "lose":
            ledger.counters["missing"] += there is None
            ledger.removals.lose(inode, tier, quarantine=there is not None)
        elif remedy in {"recount", "plain"} and there is not None:
            before = inode.copy()
            if remedy == "plain":
                inode.packed = None
            if inode.packed is not None and tier is ledger.tiers.nvme:
                inode.packed = inode.packed._replace(blocks=there.st_blocks)
            else:
                inode.blocks = there.st_blocks
            with self.catalog.batch() as batch:
                batch.put(inode)
                batch.then(partial(ledger.accounts.dismiss, before))
                batch.then(partial(ledger.accounts.enter, inode))


def _stat_all(paths: Iterable[str]) -> list[Stat]:
    return [_stat(path) for path in paths]


def _stat(path: str) -> Stat:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error


def _there(tier: Tier) -> bool:
    return tier.present() and os.path.isdir(f"{tier.root}/objects")
