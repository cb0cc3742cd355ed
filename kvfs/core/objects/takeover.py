"""Take over the open objects of the previous daemon, and finish the work that it had begun.

Contract: `adopt` is called once, before this daemon serves a request, and takes one step of the
loop. The handles name the open objects; the catalog describes them. An inode that is marked
unfinished and has no handle is the work of a writer that is dead, or whose request is not answered
yet and comes again. `adopt` seals it as it is, like a file of a process that dies on a local disk.
If it was lent (`saves`), it is sealed when its writer closes it.
Not for the death of a machine: `recovery` handles that.
"""

import logging
import os
from collections.abc import Iterable
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.core.ledger import recovery
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.objects import Objects
from kvfs.errors import InUseError, KvfsError, NotFoundError, TierError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)


class Left(NamedTuple):
    """A handle that the previous daemon left; `tier` is the tier's number.

    ending: its RELEASE was under way. Then the inode may have been opened anew since.
    direct: the object was opened while its bytes came from the bucket.
    """

    handle: int
    ino: int
    backing_id: int
    writable: bool
    tier: int
    ending: bool
    direct: bool = False


def adopt(objects: Objects, handles: Iterable[Left]) -> dict[int, OpenObject]:
    """Open the objects again, and return them by handle. A handle without an inode has none."""
    ledger = objects.ledger
    marked = ledger.catalog.unfinished()
    for ino in marked:
        _give_name_back(ledger, ino)
    by_inode: dict[int, list[Left]] = {}
    for left in handles:
        by_inode.setdefault(left.ino, []).append(left)
    found = {}
    for ino, lefts in by_inode.items():
        inode = ledger.catalog.inode(ino)
        if inode is not None:  # else its release was nearly done
            last = _last_opened(ledger, inode, lefts)
            if last:
                held = _reopen(objects, inode, last)
                found.update({left.handle: held for left in last})
    for ino in marked:
        _finish(objects, ino)
    return found


def _give_name_back(ledger: Ledger, ino: int) -> None:
    """Give the file its old name back if a writer's open was about to begin a new version."""
    inode = ledger.catalog.inode(ino)
    if inode is not None and inode.sealed and inode.links:
        try:
            recovery.give_name_back(ledger, inode)
        except TierError as error:
            what = ledger.catalog.named(ino)
            log.error("opens of %s may be misses until the next mount: %s", what, error)


def _last_opened(ledger: Ledger, inode: Inode, lefts: list[Left]) -> list[Left]:
    """Return the handles of the latest open object of an inode: they share tier and backing id.

    Backing ids rise. A handle with another tier or id was finished before that object was opened;
    only its RELEASE was not answered yet. But a direct object may have moved to another tier when
    its bytes had to come once more.
    """
    holders = {tier.number for tier in ledger.tiers.holders(inode)}
    lefts = [left for left in lefts if not left.ending or left.tier in holders]
    living = [left for left in lefts if not left.ending] or lefts
    if not living:
        return []
    last = max(living, key=lambda left: (left.tier in holders, left.backing_id))
    shared = (last.tier, last.backing_id)
    return [
        left
        for left in lefts
        if (left.tier, left.backing_id) == shared or (last.direct and left.direct)
    ]


def _reopen(objects: Objects, inode: Inode, lefts: list[Left]) -> OpenObject:
    """Open an object as the previous daemon had it, even if the record has lost its copy.

    If only RELEASEs are left, the backing id is not used again. The id was closed with the last of
    them, or a moment before the daemon died. The kernel answers an open with such an id by EIO, and
    says nothing to the daemon.
    """
    ledger = objects.ledger
    ended = all(left.ending for left in lefts)
    ino, backing_id = inode.ino, lefts[0].backing_id
    [tier] = (tier for tier in ledger.tiers.local if tier.number == lefts[0].tier)
    writers = sum(left.writable for left in lefts)
    fd, direct, holders = -1, lefts[0].direct, ledger.tiers.holders(inode)
    doubted = (ino, inode.version, tier.name) in ledger.verified.doubted
    if direct and tier not in holders and holders:
        tier = holders[0]
    if direct and not holders:
        what = ledger.catalog.named(ino)
        log.info("%s was read while it came; the rest comes anew", what)
    elif writers or not backing_id:  # else the kernel has the file, and the daemon needs none
        fd = _file(ledger, inode, tier, writable=writers > 0)
    held = OpenObject(
        inode,
        tier,
        fd,
        writable=writers > 0 and fd >= 0,
        backing_id=0 if ended else backing_id,
        readers=len(lefts) - writers,
        writers=writers,
        accounted=bool(inode.links) and not writers,
        reopened=backing_id > 0 and not ended,
        direct=direct,
        lost=not direct and (tier not in holders or doubted),
    )
    if ended and backing_id and fd >= 0:
        held.backing_id = objects.files.backings.register(fd)
    if not inode.links:
        held.publish = ledger.catalog.to_publish(ino)
        held.doom = objects.publishing.doom_of(ino)
    if inode.sealed:
        held.sealed_as = (inode.size, inode.backing_mtime_ns, inode.blocks)
    ledger.table.open[ino] = held
    if not held.accounted:
        blocks = os.fstat(fd).st_blocks if fd >= 0 else inode.blocks
        held.reserve(tier.cost(blocks))
    if writers:
        ledger.table.stage(held)
    if held.doom is not None:
        held.leaving = held.staged
        ledger.table.weigh(held, 0)
    return held


def _file(ledger: Ledger, inode: Inode, tier: Tier, *, writable: bool) -> int:
    """Open the backing file; -1 if that fails, which its reader or the seal will find."""
    try:
        return tier.open(inode.ino, inode.version, writable=writable)
    except (NotFoundError, InUseError, TierError) as error:
        what = ledger.catalog.named(inode.ino)
        log.error("%s was open, and its file cannot be opened again: %s", what, error)
        return -1


def _finish(objects: Objects, ino: int) -> None:
    """Finish an inode that is marked unfinished and is neither being written nor in use."""
    ledger = objects.ledger
    inode = ledger.table.inode(ino)
    if inode is not None and inode.is_file and inode.sealed and inode.links:
        _watch(objects, inode)
    elif inode is None or (inode.sealed and inode.links):
        with ledger.catalog.batch() as batch:
            batch.mark_finished(ino)
    elif ino in ledger.table.open:
        return
    elif inode.is_file and not ledger.tiers.holders(inode):
        ledger.removals.drop(inode, "unfinished")
    elif inode.links:
        _seal(ledger, objects, inode)
    elif (why := objects.publishing.doom_of(ino)) is not None and inode.is_file:
        _watch(objects, inode)  # it was lent, so no handle says if it is being written
        if (held := ledger.table.open.get(ino)) is not None:
            held.doom, held.leaving = why, held.staged
            ledger.table.weigh(held, 0)
    else:
        if ledger.catalog.to_publish(ino) is not None:
            _measure(ledger, objects, inode)
        ledger.orphans.enter(inode)


def _measure(ledger: Ledger, objects: Objects, inode: Inode) -> None:
    """Record the size of a file whose CREATE was not answered and comes again."""
    tier = ledger.tiers.holders(inode)[0]
    fd = _file(ledger, inode, tier, writable=False)
    if fd >= 0:
        objects.files.measure(OpenObject(inode, tier, fd, writable=False, writers=1))
        os.close(fd)
        with ledger.catalog.batch() as batch:
            batch.put(inode)


def _watch(objects: Objects, inode: Inode) -> None:
    """Count a writer for a file that may be mapped, until a look shows that it is not."""
    ledger = objects.ledger
    held = ledger.table.open.get(inode.ino)
    if held is None:
        tier = ledger.tiers.holders(inode)[0]
        held = OpenObject(inode, tier, fd=-1, writable=False)
    if not held.writable:
        fd = _file(ledger, inode, held.tier, writable=True)
        if fd < 0:
            if inode.ino not in ledger.table.open and _is_gone(held.tier, inode):
                _lose(ledger, inode, held.tier)
            return
        if held.fd >= 0:
            os.close(held.fd)
        held.fd, held.writable, held.reopened = fd, True, True
    if not held.writers:
        held.accounted = False
        held.reserve(held.tier.cost(os.fstat(held.fd).st_blocks))
        ledger.table.open[inode.ino] = held
        ledger.table.stage(held)
    held.writers += 1
    held.mapped = True
    if not held.backing_id:
        held.backing_id = objects.files.register(held)


def _is_gone(tier: Tier, inode: Inode) -> bool:
    """Whether a tier that answers has no file of an inode: then nobody can write it any more."""
    try:
        os.lstat(tier.path(inode.ino, inode.version))
    except FileNotFoundError:
        return tier.present()
    except OSError:
        return False
    return False


def _lose(ledger: Ledger, inode: Inode, tier: Tier) -> None:
    """Lose a copy without a file, and the mark with it: else each daemon looks for the file."""
    ledger.removals.lose(inode, tier)
    with ledger.catalog.batch() as batch:
        batch.mark_finished(inode.ino)


def _seal(ledger: Ledger, objects: Objects, inode: Inode) -> None:
    tier = ledger.tiers.holders(inode)[0]
    try:
        fd = tier.open(inode.ino, inode.version, writable=False)
    except KvfsError as error:
        what = ledger.catalog.named(inode.ino)
        log.error("%s was being created and is lost: it has no file: %s", what, error)
        ledger.removals.drop(inode, "unfinished")
        return
    if tier.is_in_use(fd):  # a process has a descriptor that it was lent for writing
        os.close(fd)
        _watch(objects, inode)
        return
    held = OpenObject(inode, tier, fd, writable=False, writers=1)
    objects.sealing.flush(held, writable=True)
    os.close(fd)
