"""The kernel's side of a mount: backing ids, repeated requests, names that are gone.

Contract: import this before pyfuse3, else the C part cannot replace libfuse's mount call (see
_passthrough.c). Every change is in the session file at once, for the next daemon. Without
privileges or on an older kernel the daemon serves all bytes itself, and the rest is the same. Not
for deciding which file backs an object.
"""

import errno
import heapq
import logging
import os
import sys
from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kvfs import failpoints

log = logging.getLogger(__name__)

if "pyfuse3" in sys.modules:
    raise ImportError("kvfs.fuse.passthrough must be imported before pyfuse3")
_flags = sys.getdlopenflags()
sys.setdlopenflags(_flags | os.RTLD_GLOBAL)
try:
    from kvfs.fuse import _passthrough
finally:
    sys.setdlopenflags(_flags)
fast = _passthrough  # for fast_open.py, which has its half of the C part's functions

# From linux/fuse.h: struct fuse_out_header, of an unrequested message; enum fuse_notify_code;
# struct fuse_notify_inval_inode_out.
_NOTIFY = Struct("<IiQ")
_INVAL_INODE, _INC_EPOCH = 2, 8  # the second since Linux 6.16
_INODE = Struct("<Qqq")
SLOTS, TEXT, FILE_SIZE = _passthrough.SLOTS, _passthrough.TEXT, _passthrough.FILE_SIZE


class SlotState(IntEnum):
    """The life of a slot; the C part documents each state's meaning to the next daemon."""

    FREE = _passthrough.FREE
    BOUND = _passthrough.BOUND
    ANSWERING = _passthrough.ANSWERING
    OPEN = _passthrough.OPEN
    RELEASING = _passthrough.RELEASING


class Slot(NamedTuple):
    """A file handle in the session file."""

    handle: int
    inode: int
    request: int
    backing_id: int
    state: SlotState
    writable: bool
    tier: int
    direct: bool = False  # past the page cache


class Passthrough:
    """The kernel reads and writes backing files itself, where it can and may."""

    def __init__(self, *, unwanted: str = "", fast_open: bool = False) -> None:
        """`unwanted`: the reason not to ask for passthrough; "": ask.

        fast_open: let a thread of the C part read the requests (`_fast_open.c`).
        """
        self.unwanted = unwanted
        self.fast_open = fast_open
        self._refusals = 0
        self._entries: dict[int, int] = {}  # backing id -> its entry in the session file
        self._free: list[int] = []
        self._end = 0
        self._device = -1

    def attach(self, device: int, session_file: int, *, takeover: bool) -> None:
        _passthrough.attach(device, not self.unwanted, session_file, takeover, self.fast_open)
        self._device = device

    @property
    def negotiated(self) -> bool:
        """Whether this daemon or the first one has answered the kernel's INIT."""
        return _passthrough.state()[0]

    @property
    def on(self) -> bool:
        return _passthrough.state()[2]

    @property
    def why(self) -> str:
        _, offered, engaged = _passthrough.state()
        if engaged:
            return "offered by the kernel and asked for"
        if self.unwanted:
            return self.unwanted
        if not offered:
            return "this kernel does not offer FUSE_PASSTHROUGH (Linux 6.9 and later do)"
        return "offered by the kernel, but not taken"

    # Backing ids

    def register(self, fd: int) -> int:
        """A backing id for an open file, 0 where the kernel refuses."""
        if not self.on:
            return 0
        entry = heapq.heappop(self._free) if self._free else self._end
        try:
            backing_id = _passthrough.open_backing(fd, entry)
            if failpoints.active:
                failpoints.reach("fuse.backing.opened")
        except (OSError, ValueError) as error:
            self._refusals += 1
            if self._refusals == 1:
                log.error("the kernel refuses a backing file, kvfs serves it itself: %s", error)
            backing_id = 0
        if entry == self._end:
            self._end += 1
        if backing_id:
            self._entries[backing_id] = entry
        else:
            heapq.heappush(self._free, entry)
        return backing_id

    def release(self, backing_id: int) -> None:
        """Close a backing id that no handle uses: its RELEASE has come.

        The kernel lets go of an inode's backing before it sends the RELEASE of its last handle. So
        the reply need not come first (measured with tests/mount/test_stress.py: no open failed).
        Waiting would keep the memory of an unlinked file in use.
        """
        entry = self._entries.pop(backing_id)
        try:
            _passthrough.close_backing(backing_id, entry)
        except OSError as error:
            log.error(
                "backing id %d cannot be closed, its file keeps its room: %s", backing_id, error
            )
        heapq.heappush(self._free, entry)
        if failpoints.active:
            failpoints.reach("fuse.backing.closed")

    def adopt(self, used: Iterable[int]) -> None:
        """Take over the previous daemon's ids, and close those that no handle uses.

        A handle that is being released uses none: its id may be closed already, and the inode have
        another one. An id left open in the kernel would look like a mapping for as long as it
        lives.
        """
        wanted = set(used)
        found = _passthrough.backings()
        for entry, backing_id in found:
            self._end = max(self._end, entry + 1)
            if backing_id in wanted:
                self._entries[backing_id] = entry
                continue
            try:
                _passthrough.close_backing(backing_id, entry)
            except OSError as error:
                if error.errno != errno.ENOENT:  # closed already: the daemon died before the note
                    log.error(
                        "backing id %d cannot be closed, its file keeps its room: %s",
                        backing_id,
                        error,
                    )
        taken = set(self._entries.values())
        self._free = [entry for entry in range(self._end) if entry not in taken]

    # Handles

    def bind(self, slot: Slot, *, noflush: bool) -> None:
        """Record what the OPEN or CREATE reply says of this handle, and for which request it is."""
        handle, inode, request, backing_id, _, writable, tier, direct = slot
        _passthrough.bind(handle, inode, request, backing_id, noflush, direct, writable, tier)

    set_state = staticmethod(_passthrough.set_state)

    @staticmethod
    def slots() -> list[Slot]:
        found = map(Slot._make, _passthrough.slots())
        return [slot._replace(state=SlotState(slot.state)) for slot in found]

    # The first number that no handle ever had; all greater ones are unused too.
    slots_end = staticmethod(_passthrough.slots_end)

    # Requests

    # (number, whether it comes again) of the request whose handler has just begun, and its thread
    # as the kernel knows it. Valid only right before the handler's first await.
    request = staticmethod(_passthrough.request)
    requester = staticmethod(_passthrough.requester)
    requested_inode = staticmethod(_passthrough.requested_inode)
    # Whether a request is there. May wait for some 30 us, if requests come one by one.
    readable = staticmethod(_passthrough.readable)
    # Whether the kernel has sent again all requests that the previous daemon left unanswered.
    resends_over = staticmethod(_passthrough.resends_over)

    @staticmethod
    def fill(request: int, fd: int, offset: int, length: int, *, nowait: bool) -> bool:
        """Fill the empty answer to a READ with these bytes of a file; return whether it will be.

        Call it only right before the handler returns. nowait: refuse if this would wait for a disk.
        """
        return _passthrough.fill(request, fd, offset, length, nowait)

    @staticmethod
    def invalidate_name(parent: int, name: bytes, ino: int) -> None:
        """Tell the kernel that a name is gone. Never blocks.

        If the bounded queue is full, the kernel's own timeout ends the name. An open of such a name
        is ESTALE anyway.
        """
        del ino
        _passthrough.gone(parent, name)

    def changed(self, ino: int) -> None:
        """Tell the kernel that it must ask for an inode's attributes again. Never blocks.

        The kernel keeps its cached bytes.
        """
        header = _NOTIFY.pack(_NOTIFY.size + _INODE.size, _INVAL_INODE, 0)
        try:
            os.write(self._device, header + _INODE.pack(ino, -1, 0))
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTCONN, errno.ENODEV}:  # no such inode
                raise

    def invalidate_tree(self, parent: int, name: bytes, ino: int) -> None:
        """Tell the kernel that a name is gone with all below it. On return the kernel knows it.

        The kernel looks up every name on the mount once more, because it may have cached millions
        of names below, and messages of `invalidate_name` wait in a queue. Before Linux 6.16 only
        that queue is left.
        """
        try:
            os.write(self._device, _NOTIFY.pack(_NOTIFY.size, _INC_EPOCH, 0))
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTCONN, errno.ENODEV}:
                raise
            log.debug("names below %r are left to the kernel's queue: %s", os.fsdecode(name), error)
        self.invalidate_name(parent, name, ino)
