"""The emptying of the trash: backing files that no record names any more.

Contract: `Trash.files` lists the files to remove. An entry leaves the list when its file is
removed, or was tried. While NVMe is down, nothing is removed. If a failing disk refuses a removal,
kvfs tries it once more when the disk is healthy; after that the next mount's sweep finds the file.
Only one task empties at a time (the dispatcher; at the end of a mount, the daemon).
"""

import os
from collections.abc import Container
from functools import partial

from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.trash import TrashFile
from kvfs.tiers import NvmeTier

AT_ONCE = 64  # files that one thread removes


class TrashBin:
    """Removes files of the trash. `jobs` are inodes that movers work on: they may remake files."""

    def __init__(self, ledger: Ledger, jobs: Container[int]) -> None:
        self.ledger = ledger
        self._jobs = jobs
        self._undeleted: list[TrashFile] = []  # files in the trash that a failing disk kept

    def __len__(self) -> int:
        """The backing files that wait for their removal."""
        return len(self.ledger.trash.files) + len(self._undeleted)

    async def empty(self) -> None:
        """Remove the files in the trash."""
        trash, nvme = self.ledger.trash.files, self.ledger.tiers.nvme
        while trash and nvme.works:
            batch = trash[:AT_ONCE]
            self._undeleted += await self._remove(batch, nvme)
            del trash[: len(batch)]
        if (closing := self.ledger.trash.closing) and nvme.works:
            self.ledger.trash.closing = []
            await nvme.calls.run_unlimited(partial(_close_all, closing))
        if self._undeleted and nvme.health.state == "healthy":
            again, self._undeleted = self._undeleted, []
            batch = [one for one in again if not self._in_use(one)]
            await self._remove(batch, nvme)

    async def _remove(self, batch: list[TrashFile], nvme: NvmeTier) -> list[TrashFile]:
        """Remove a batch of files. Returns those that the disk refused to remove."""
        done = await nvme.calls.run_unlimited(partial(_remove_all, batch))
        for trash, (its, fd) in zip(batch, done, strict=True):
            self.ledger.trash.removed(trash, its, fd)
        return [trash for trash, (its, _) in zip(batch, done, strict=True) if its is False]

    def _in_use(self, trash: TrashFile) -> bool:
        """Whether a backing file in the trash has been made again since."""
        current = self.ledger.table.inode(trash.ino)
        if current is None or current.version != trash.version:
            return False
        return trash.ino in self._jobs or trash.tier in self.ledger.tiers.holders(current)


def _remove_all(batch: list[TrashFile]) -> list[tuple[bool | None, int]]:
    return [trash.remove() for trash in batch]


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
