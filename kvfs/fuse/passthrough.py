"""Kernel passthrough: backing ids, and the C part that puts them into replies.

Contract: import this before pyfuse3, else the C part cannot take the place of libfuse's mount call
(see _passthrough.c). `Passthrough` and `Served` are the two ways in which `core.objects` gets its
bytes served. Not for deciding which file backs an object.
"""

import logging
import os
import sys

log = logging.getLogger(__name__)

if "pyfuse3" in sys.modules:
    raise ImportError("kvfs.fuse.passthrough must be imported before pyfuse3")
_flags = sys.getdlopenflags()
sys.setdlopenflags(_flags | os.RTLD_GLOBAL)
try:
    from kvfs.fuse import _passthrough
finally:
    sys.setdlopenflags(_flags)

SLOTS = _passthrough.SLOTS


class Passthrough:
    """The kernel reads and writes backing files by itself, where it can."""

    def __init__(self, device: int, *, wanted: bool) -> None:
        self.wanted = wanted
        self._refusals = 0
        _passthrough.attach(device, wanted)

    @property
    def on(self) -> bool:
        return _passthrough.state()[1]

    @property
    def why(self) -> str:
        offered, engaged = _passthrough.state()
        if engaged:
            return "offered by the kernel and asked for"
        if not self.wanted:
            return "turned off by passthrough=off"
        if not offered:
            return "this kernel does not offer FUSE_PASSTHROUGH (Linux 6.9 and later do)"
        return "offered by the kernel, but not taken"

    def register(self, fd: int) -> int:
        """A backing id for an open file, 0 where the kernel refuses."""
        if not self.on:
            return 0
        try:
            return _passthrough.open_backing(fd)
        except OSError as error:
            self._refusals += 1
            if self._refusals == 1:
                log.error("the kernel refuses a backing file, kvfs serves it itself: %s", error)
            return 0

    def release(self, backing_id: int) -> None:
        """No handle uses the id any more: its RELEASE has come.

        The kernel lets go of an inode's backing before it sends the RELEASE of its last handle, so
        that nothing needs to wait for the reply (measured with tests/mount/test_stress.py: no open
        failed). Whoever waits keeps an unlinked file's memory taken.
        """
        try:
            _passthrough.close_backing(backing_id)
        except OSError as error:
            log.error("backing id %d cannot be closed: %s", backing_id, error)

    def bind(self, handle: int, backing_id: int, *, noflush: bool) -> None:
        _passthrough.bind(handle, backing_id, noflush)
