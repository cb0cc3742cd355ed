"""What /proc says of the thread whose request it is: that it is killed, that it serves NFS.

Contract: the kernel asks for a thread, and waits for the answer even when that thread is killed, so
a wait that may take long goes on only as long as somebody wants its end. Looked at once a second:
libfuse keeps FUSE_INTERRUPT to itself, and that comes for any signal, also one with a handler,
after which open(2) is expected to go on. A thread that the daemon does not see (of another PID
namespace, or with hidepid) waits to the end, and serves no NFS. Not for a FLUSH: it does not say
whose it is.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import trio

from kvfs.core.objects.scans import process_of

PERIOD = 1.0  # s
NFS_SERVERS = {"ganesha.nfsd", "nfsd"}  # processes; threads may have names of their own
_PENDING = 28  # place of the pending signals in /proc/TID/stat, counted behind the name
_KILL = 1 << signal.SIGKILL - 1


def killed(thread: int) -> bool:
    """Whether a signal will end it: SIGKILL, which the kernel makes of others but to dump core."""
    try:
        text = Path(f"/proc/{thread}/stat").read_text("ascii", "replace")
    except OSError:
        return False  # not seen from here
    return bool(int(text.rpartition(")")[2].split()[_PENDING]) & _KILL)


def is_nfs_server(thread: int) -> bool:
    """Whether it is an NFS server that asks: two small files of /proc, some 30 us.

    With `publish=close` a new file has no name before its writer has closed it. That is for
    programs: an NFS server looks what it makes up by name (nfs-ganesha's FSAL_VFS, vfs_open2), and
    has it open for as long as it likes, beyond its client's CLOSE too; its client's rename would be
    ENOENT. So what it makes has its name at once.
    """
    try:
        name = Path(f"/proc/{process_of(thread)}/comm").read_text("utf-8", "replace")
    except OSError:
        return False
    return name.strip() in NFS_SERVERS


class Waits:
    """Those under way."""

    def __init__(self) -> None:
        self._threads: dict[trio.CancelScope, int] = {}

    @contextlib.contextmanager
    def unless_killed(self, thread: int) -> Iterator[trio.CancelScope]:
        """Wait in the block; its scope says whether it was cut short."""
        with trio.CancelScope() as scope:
            self._threads[scope] = thread
            try:
                yield scope
            finally:
                del self._threads[scope]

    async def watch(self) -> None:
        """End those that nobody wants any more; as long as the mount."""
        while True:
            await trio.sleep(PERIOD)
            for scope, thread in list(self._threads.items()):
                if killed(thread):
                    scope.cancel()
                await trio.lowlevel.checkpoint()
