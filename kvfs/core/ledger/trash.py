"""Backing files that no record names any more: unlinked, or moved into quarantine.

Contract: a file in RAM goes at once; one on a disk waits in `files` for `core/moves/trash.py`,
since a disk may hang. Synchronous.
"""

import logging
from collections import Counter
from typing import NamedTuple

from kvfs.core.ledger.work import Work
from kvfs.tiers import Tier

log = logging.getLogger(__name__)


class TrashFile(NamedTuple):
    """A backing file that no record names any more; `keep`: for a human to look at.

    why: what the log says of one that is kept.
    """

    tier: Tier
    ino: int
    version: int
    keep: bool = False
    why: str = ""

    def remove(self) -> bool | None:
        """Whether it is gone from where it was; None: there was nothing to keep.

        May wait for a disk.
        """
        act = self.tier.quarantine if self.keep else self.tier.unlink
        return act(self.ino, self.version)


class Trash:
    """`files` wait for the task that unlinks them."""

    def __init__(self, counters: Counter[str], work: Work) -> None:
        self.counters = counters
        self.work = work
        self.files: list[TrashFile] = []

    def throw_away(
        self, tier: Tier, ino: int, version: int, *, keep: bool = False, why: str = ""
    ) -> None:
        """Unlink a backing file: at once where a writer may need the room in this very moment.

        In RAM that costs 0.13 to 0.34 ms for 32 MiB; on a disk it may wait for its journal.
        keep: put it into quarantine instead. why: see `removed`.
        """
        trash = TrashFile(tier, ino, version, keep, why)
        if tier.slow:
            self.files.append(trash)
            self.work.wake()
        else:
            self.removed(trash, done=trash.remove())

    def removed(self, trash: TrashFile, *, done: bool | None) -> None:
        """What was thrown away was removed, if that is `done`: count and say what was kept.

        That is the one place which does, so that both tell of files that are in the quarantine. A
        check of the whole mount tells what it has found itself, and gives no reason.
        """
        if not (trash.keep and done):
            return
        self.counters["quarantined"] += 1
        if trash.why:
            where = trash.tier.path(trash.ino, trash.version)
            log.error("%s tier: %s is quarantined: %s", trash.tier.name, where, trash.why)
