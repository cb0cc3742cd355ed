"""Refusals: the log says why writers of a namespace get ENOSPC or EDQUOT, and what holds the room.

Contract: programs see only the errno. `log_refusal` writes one line for each cause: a namespace, an
errno, and a reason why room is held. For QUIET it writes no further line for causes that a line has
told. A line tells all that holds room. Synchronous. Not for decisions.
"""

import errno
import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from kvfs.core.capacity import free_space
from kvfs.core.capacity.free_space import Holder
from kvfs.core.capacity.room import Room
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import KvfsError, NoSpaceError, QuotaError
from kvfs.tiers import Tier
from kvfs.units import human

log = logging.getLogger(__name__)

QUIET = 600.0  # s
LOOK = 0.1  # s between two looks at what holds the room, which takes a ms with many open files
HOLDERS = 5  # that a line names
WHYS = {  # by `Holder.why`
    "pin": "pin=on",
    "never": "eviction=never",
    "kept": "{files} of its files are pinned, or kept for their connector",
    "open": "open files",
    "gone": "unlinked files that processes may have",
    "written": "files being written",
    "spared": "it gives room only after namespace {writer}",
    "twins": "copies of what ram has as well",
}
CURES = {  # by `Holder.why`; a line has those of the most bytes first
    "pin": ("set pin=off", "unlink files"),
    "never": ("set another eviction", "unlink files"),
    "kept": ("unpin files", "unlink files"),
    "open": ("close open files (unlinked ones keep their room)",),
    "gone": ("end the processes that have unlinked files",),
    "written": ("write fewer files at a time",),
    "spared": ("raise the weight of namespace {writer}",),
    "bucket": ("wait for the uploads",),
}


def code_of(error: KvfsError) -> str:
    """Return the errno of an error for lack of room, as text."""
    return errno.errorcode[errno.EDQUOT if isinstance(error, QuotaError) else errno.ENOSPC]


class HeldRoom(NamedTuple):
    """The causes for which a writer gets no room. text: with the cures, for a line of the log."""

    causes: frozenset[str]
    text: str


class Told:
    """Causes that a line of the log has told within QUIET: a namespace, an errno and a reason."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, str, str], float] = {}  # monotonic s of the last line

    def add(self, causes: set[tuple[int, str, str]]) -> bool:
        """Return whether one of these causes is to be told; then all count as told now."""
        now = time.monotonic()
        self._at = {cause: at for cause, at in self._at.items() if now - at < QUIET}
        if causes <= self._at.keys():
            return False
        self._at |= dict.fromkeys(causes, now)
        return True


class Refusals:
    """The causes that were told lately."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._told = Told()
        self._looked: dict[tuple[int, str], float] = {}  # namespace, errno -> monotonic s

    def log_refusal(self, space: Namespace, error: NoSpaceError | QuotaError) -> None:
        """Log that a writer of a namespace got an error."""
        code = code_of(error)
        now = time.monotonic()
        if now - self._looked.get((space.ino, code), -LOOK) < LOOK:
            return
        self._looked[space.ino, code] = now
        if isinstance(error, QuotaError):
            found = held_quota(self.room, space, error)
        else:
            tiers = [tier for tier in self.room.ledger.tiers.local if space.takes(tier)]
            found = held_room(self.room, space, tiers)
        causes = {(space.ino, code, cause) for cause in found.causes or {""}}
        if not self._told.add(causes):
            return
        log.warning(
            "namespace %s: writers get %s: %s; %s (said once in %.0f minutes per cause)",
            *(self.room.ledger.namespaces.name(space.ino), code, error, found.text, QUIET / 60),
        )


def held_quota(
    room: Room, space: Namespace, error: QuotaError, growing: OpenObject | None = None
) -> HeldRoom:
    """Say why a hard quota has no room, and the cures: all causes are in the namespace itself.

    growing: a file of the namespace that does not count.
    """
    ledger = room.ledger
    found = free_space.holders(room, space, ledger.tiers.local, growing)
    whys = {one.why: _why(one, "") for one in found if one.space is space}
    if ledger.dirty.bytes and space.takes(ledger.tiers.bucket):
        whys["bucket"] = "objects that wait for the bucket"
    text = "; ".join(filter(None, (", ".join(whys.values()), _cures(whys, "", "raise its quota"))))
    return HeldRoom(frozenset({*whys, error.because} - {""}), text)


def held_room(
    room: Room,
    writer: Namespace | None,
    tiers: list[Tier],
    growing: OpenObject | None = None,
    *,
    demotes: bool = False,
) -> HeldRoom:
    """Say what holds the room that a namespace's writer needs in these tiers, and the cures.

    Arguments are those of `free_space.holders`.
    """
    ledger = room.ledger
    name = "" if writer is None else ledger.namespaces.name(writer.ino)
    holders = free_space.holders(room, writer, tiers, growing, demotes=demotes)
    found = [
        f"namespace {ledger.namespaces.name(one.space.ino)} has {human(one.bytes)} "
        f"({_why(one, name)}{_both(one, tiers)})"
        for one in holders[:HOLDERS]
    ]
    if len(holders) > HOLDERS:
        found.append(f"{human(sum(one.bytes for one in holders[HOLDERS:]))} more")
    whys = [one.why for one in holders]
    named = whys[:HOLDERS]
    if ledger.dirty.bytes:
        found.append(f"{human(ledger.dirty.bytes)} wait for the bucket")
        whys.append("bucket")
        named.append("bucket")
    held = f"the room is held: {', '.join(found)}" if found else ""
    size = "ram" if tiers == [ledger.tiers.ram] else "nvme_size"
    cures = _cures(named, name, f"give a larger tier: kvfs upgrade MOUNT -o {size}=")
    return HeldRoom(frozenset(whys), "; ".join(filter(None, (held, cures))))


def _cures(whys: Iterable[str], writer: str, last: str) -> str:
    """The cures of these reasons, in this order, and one that always helps."""
    found = (cure.format(writer=writer) for why in whys for cure in CURES.get(why, ()))
    return " or ".join(filter(None, (", ".join(dict.fromkeys(found)), last)))


def _why(holder: Holder, writer: str) -> str:
    """Why a writer of a namespace cannot get these bytes."""
    return WHYS[holder.why].format(files=holder.space.kept_objects, writer=writer)


def _both(holder: Holder, tiers: list[Tier]) -> str:
    twice = holder.why == "pin" and len(tiers) > 1 and holder.space.doubled_bytes
    return "; copies in ram and nvme both count" if twice else ""
