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
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import NoSpaceError, QuotaError
from kvfs.tiers import Tier
from kvfs.units import human

log = logging.getLogger(__name__)

QUIET = 600.0  # s
HOLDERS = 5  # that a line names
IN_USE = "its files are open, mapped or being written"
CURES = {  # by `Holder.why`, in the order of a line
    "kept": "unpin or unlink files",
    "open": "close open files (unlinked ones keep their room)",
    "gone": "end the processes that have unlinked files",
    "written": "write fewer files at a time",
    "spared": "raise the weight of namespace {name}",
}


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
            why = _why_kept(space) or IN_USE
            return f"{why}; raise its quota, or {'close' if why == IN_USE else 'unlink'} files"
        tiers = [tier for tier in self.room.ledger.tiers.local if space.takes(tier)]
        return held_room(self.room, space, tiers)


def held_room(
    room: Room, writer: Namespace, tiers: list[Tier], growing: OpenObject | None = None
) -> str:
    """Say what holds the room that a namespace's writer needs in these tiers, and the cures.

    growing: the writer's file, if it has one already.
    """
    ledger, name = room.ledger, room.ledger.namespaces.name(writer.ino)
    holders = free_space.holders(room, writer, tiers, growing)
    found = [
        f"namespace {ledger.namespaces.name(one.space.ino)} has {human(one.bytes)} "
        f"({_why(one, name, tiers)})"
        for one in holders[:HOLDERS]
    ]
    if len(holders) > HOLDERS:
        found.append(f"{human(sum(one.bytes for one in holders[HOLDERS:]))} more")
    if ledger.dirty.bytes:
        found.append(f"{human(ledger.dirty.bytes)} wait for the bucket")
    whys = {one.why for one in holders}
    cures = [cure.format(name=name) for why, cure in CURES.items() if why in whys]
    return f"the room is held: {', '.join(found)}; " + ", ".join([*cures, "or give a larger tier"])


def _why(holder: Holder, writer: str, tiers: list[Tier]) -> str:
    """Why a writer of a namespace cannot get these bytes."""
    space = holder.space
    if holder.why == "kept":
        both = space.settings.pin and len(tiers) > 1 and space.doubled_bytes
        return _why_kept(space) + ("; copies in ram and nvme both count" if both else "")
    return {
        "open": "open files",
        "written": "files being written",
        "gone": "unlinked files that processes may have",
        "spared": f"it gives room only after namespace {writer}",
    }[holder.why]


def _why_kept(space: Namespace) -> str:
    """Why kvfs does not evict objects of a namespace; "" if it may evict all."""
    if space.settings.pin:
        return "pin=on"
    if space.settings.eviction == "never":
        return "eviction=never"
    if space.kept_objects:
        return f"{space.kept_objects} of its files are pinned, or kept for their connector"
    return ""
