"""Find backing files that no record means: leftovers, half-made copies and foreign files.

Contract: `run` looks at every name in `objects/`, a folder at a time, in a thread. It looks again,
with the inode held, at a file that no record means. A copy in the wrong folder moves to the place
that its record means, if that is free. Other such files are removed, as the next mount would do. If
names are lost, leftovers go into quarantine instead. Files in quarantine are counted and never
touched.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from kvfs.core.check.survey import Survey
from kvfs.movement.files import PART
from kvfs.tiers import Tier

FOLDERS = 16  # that one thread lists at a time
# A file of a create that is under way has no record yet. None of them takes so long (s).
CREATE_PATIENCE = 60.0

Listed = list[str] | OSError | None  # None: there is no such folder


class FileCheck:
    """Checks the files of all tiers, except tiers in `lost`."""

    def __init__(self, survey: Survey, lost: set[Tier]) -> None:
        self.survey = survey
        self.ledger = survey.ledger
        self.lost = lost

    async def run(self) -> None:
        survey = self.survey
        tiers = [tier for tier in self.ledger.tiers.local if tier not in self.lost]
        survey.begin("files", sum(len(tier.folders) for tier in tiers))
        for tier in tiers:
            for first in range(0, len(tier.folders), FOLDERS):
                folders = tier.folders[first : first + FOLDERS]
                listed = await survey.io(partial(_names_of_all, folders))
                for folder, names in zip(folders, listed, strict=True):
                    await self._folder(tier, folder, names)
                    await survey.step()
            survey.notes["quarantined"] += await survey.io(partial(_count, tier))

    async def _folder(self, tier: Tier, folder: str, names: Listed) -> None:
        survey = self.survey
        if isinstance(names, OSError):
            what = f"{tier.name} tier: the folder cannot be read: {names}"
            survey.report("folder", 0, folder, what, "none", None)
            return
        if names is None:
            if survey.repair:
                await survey.io(tier.make_folders)
            what = f"{tier.name} tier: the folder is not there"
            survey.report("folder", 0, folder, what, "make it", nothing)
            return
        for name in names:
            ino, version = _parse(name)
            moves = ino and (ino in survey.jobs or ino in self.ledger.table.busy)
            if not moves and self._wrong(tier, folder, name, ino, version) is not None:
                await self._suspect(tier, folder, name, ino, version)
            await survey.step(0)

    def _wrong(
        self, tier: Tier, folder: str, name: str, ino: int, version: int
    ) -> tuple[str, str] | None:
        """Return (kind, fault), or None if the file is sound, or is about to be."""
        if name.endswith(PART) and ino:
            return "part", "a copy that was never finished"
        if not ino:
            return "foreign", "no file of kvfs is called so"
        if any(trash[:3] == (tier, ino, version) for trash in self.ledger.trash.files):
            return None
        inode = self.survey.inode(ino)
        if inode is not None and self.survey.to_be_recovered(ino):
            return None  # it may lie under the name of its next version
        holds = inode is not None and inode.is_file and tier in self.ledger.tiers.holders(inode)
        meant = holds and inode is not None and inode.version == version
        if tier.path(ino, version) != folder + name:
            return ("misplaced" if meant else "leftover"), "it lies in the wrong folder"
        if meant:
            return None
        if inode is None:
            return "leftover", f"there is no inode {ino}"
        where = "other content" if holds else "no copy in this tier"
        return "leftover", f"inode {ino} has {where}"

    async def _suspect(self, tier: Tier, folder: str, name: str, ino: int, version: int) -> None:
        survey = self.survey
        path = folder + name
        async with survey.hold(ino) if ino else nullcontext():
            wrong = self._wrong(tier, folder, name, ino, version)
            changed = await survey.io(partial(_changed, path))
            if wrong is None or changed is None:
                return
            kind, what = wrong
            inode = survey.inode(ino) if ino else None
            young = survey.live and changed > survey.started - CREATE_PATIENCE
            if young and ino >= self.ledger.accounts.first_new and inode is None:
                return  # a create may be about to make its record
            proper = tier.path(ino, version)
            act, cure = partial(os.unlink, path), "remove it"
            if survey.doubtful and kind == "leftover":
                aside = f"{tier.root}/quarantine/{name}"
                act, cure = partial(os.rename, path, aside), "put it into quarantine"
            free = kind == "misplaced" and await survey.io(partial(_changed, proper)) is None
            if kind == "misplaced" and not free:
                kind = "leftover"
            if free:
                act, cure = partial(os.rename, path, proper), f"move it to {proper}"
                if not survey.repair:
                    survey.said.add((tier.name, ino, version))
            done: Callable[[], object] | None = nothing
            if survey.repair:
                error = await survey.io(partial(_try, act))
                self.ledger.counters["swept"] += error is None and not free
                if error is not None:
                    done, cure = None, f"none: {error}"
            names = "" if inode is None else survey.path(inode)
            survey.report(kind, ino, names, f"{tier.name} file {path}: {what}", cure, done)


def nothing() -> None:
    """Do nothing: the file was mended before the finding is reported."""


def _parse(name: str) -> tuple[int, int]:
    """Return (inode, version) of a backing file or an unfinished one; zeros for other names."""
    stem = name.removesuffix(PART)
    try:
        ino, version = (int(part, 16) for part in stem.split("."))
    except ValueError:
        return 0, 0
    return (ino, version) if f"{ino:x}.{version:x}" == stem else (0, 0)


def _names_of_all(folders: list[str]) -> list[Listed]:
    return [_names(folder) for folder in folders]


def _names(folder: str) -> Listed:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error


def _changed(path: str) -> float | None:
    """Return the file's ctime, which no program can set; None if the file is gone."""
    try:
        return os.lstat(path).st_ctime
    except FileNotFoundError:
        return None


def _try(act: partial[None]) -> OSError | None:
    """Run `act` and return its error, or None; a file that is gone is no error."""
    try:
        act()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _count(tier: Tier) -> int:
    found = _names(f"{tier.root}/quarantine")
    return len(found) if isinstance(found, list) else 0
