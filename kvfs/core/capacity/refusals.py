"""Refusals: the log says why writers of a namespace get ENOSPC or EDQUOT, and what holds the room.

Contract: programs see only the errno. `log_refusal` writes one line for a namespace and an errno,
and no further one for QUIET. Synchronous. Not for decisions.
"""

import errno
import logging
import time

from kvfs.core.capacity import free_space
from kvfs.core.capacity.free_space import Holder
from kvfs.core.capacity.room import Room
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import NoSpaceError, QuotaError

log = logging.getLogger(__name__)

QUIET = 600.0  # s
HOLDERS = 3  # namespaces that a line names


class Refusals:
    """The lines that were written lately."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._logged: dict[tuple[int, str], float] = {}  # namespace, errno -> monotonic s

    def log_refusal(self, space: Namespace, error: NoSpaceError | QuotaError) -> None:
        """Log that a writer of a namespace got an error."""
        code = errno.errorcode[errno.EDQUOT if isinstance(error, QuotaError) else errno.ENOSPC]
        now, key = time.monotonic(), (space.ino, code)
        if now - self._logged.get(key, -QUIET) < QUIET:
            return
        self._logged[key] = now
        name = self.room.ledger.namespaces.name(space.ino)
        log.warning(
            "namespace %s: writers get %s: %s; %s", name, code, error, self._cure(space, code)
        )

    def _cure(self, space: Namespace, code: str) -> str:
        if code == errno.errorcode[errno.EDQUOT]:
            return f"{self._why(space)}; raise its quota, or unlink files"
        ledger = self.room.ledger
        tiers = [tier for tier in ledger.tiers.local if space.takes(tier)]
        found = [self._shown(one) for one in free_space.holders(self.room, tiers)[:HOLDERS]]
        if ledger.dirty.bytes:
            found.append(f"{ledger.dirty.bytes} bytes wait for the bucket")
        stays = ", ".join(found) or "open files have it"
        return f"the room is held: {stays}; unpin or unlink files, or give a larger tier"

    def _shown(self, holder: Holder) -> str:
        name = self.room.ledger.namespaces.name(holder.space.ino)
        return f"namespace {name} has {holder.kept} bytes ({self._why(holder.space)})"

    def _why(self, space: Namespace) -> str:
        if space.settings.pin:
            return "pin=on"
        if space.settings.eviction == "never":
            return "eviction=never"
        if space.kept_objects:
            return f"{space.kept_objects} of its files are pinned, or kept for their connector"
        return "its files are open, mapped or being written"
