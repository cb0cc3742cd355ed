"""The emptying of the trash: backing files that no record names any more.

Contract: `Residency.trash` says what is to go; an entry leaves it when its file is gone, or was
tried. Not while NVMe is down. What a failing disk refused is tried once more when it is healthy;
after that it is the next mount's sweep that finds it. Only one task empties at a time (the
dispatcher; at the end of a mount, the daemon).
"""

from collections.abc import Container
from functools import partial

from kvfs.core.ledger.residency import Residency, Trash
from kvfs.tiers import NvmeTier

AT_ONCE = 64  # files that one thread removes


class TrashBin:
    """`jobs` are inodes that movers work on: their files may be made again."""

    def __init__(self, residency: Residency, jobs: Container[int]) -> None:
        self.residency = residency
        self._jobs = jobs
        self._undeleted: list[Trash] = []  # thrown away, but the disk failed

    def __len__(self) -> int:
        """Backing files that are to be removed."""
        return len(self.residency.trash) + len(self._undeleted)

    async def empty(self) -> None:
        """Remove what was thrown away."""
        trash, nvme = self.residency.trash, self.residency.nvme
        while trash and nvme is not None and not nvme.health.down:
            batch = trash[:AT_ONCE]
            self._undeleted += await self._remove(batch, nvme)
            del trash[: len(batch)]
        if self._undeleted and nvme is not None and nvme.health.state == "healthy":
            again, self._undeleted = self._undeleted, []
            batch = [one for one in again if not self._in_use(one)]
            await self._remove(batch, nvme)

    async def _remove(self, batch: list[Trash], nvme: NvmeTier) -> list[Trash]:
        """Returns what could not be removed."""
        done = await nvme.calls.wait(partial(_remove_all, batch))
        for trash, its in zip(batch, done, strict=True):
            self.residency.removed(trash, done=its)
        return [trash for trash, its in zip(batch, done, strict=True) if its is False]

    def _in_use(self, trash: Trash) -> bool:
        """Whether a backing file that was thrown away has been made again since."""
        current = self.residency.inode(trash.ino)
        if current is None or current.version != trash.version:
            return False
        return trash.ino in self._jobs or trash.tier in self.residency.holders(current)


def _remove_all(batch: list[Trash]) -> list[bool | None]:
    return [trash.remove() for trash in batch]
