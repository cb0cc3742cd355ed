"""Facts from /proc about the thread of a request: whether it is killed, or serves NFS.

Contract: the kernel asks for a thread, and waits for the answer even when that thread is killed. So
a long wait of the daemon ends early if its thread is killed. The daemon looks once a second.
libfuse hides FUSE_INTERRUPT, which comes for any signal, also one with a handler, after which
open(2) is expected to go on. The daemon may not see a thread (in another PID namespace, or with
hidepid). Such a thread waits to the end, and counts as no NFS server. Not for a FLUSH, which does
not tell its thread.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import trio

from kvfs.core.objects.scans import process_of

PERIOD = 1.0  # s
NFS_SERVERS = {"ganesha.nfsd", "nfsd"}  # processes; threads may have names of their own
_PENDING = 28  # index of the pending signals in /proc/TID/stat, counted behind the name
_KILL = 1 << signal.SIGKILL - 1


def killed(thread: int) -> bool:
    """Whether SIGKILL ends a thread; the kernel makes it of others, except for a core dump."""
    try:
        text = Path(f"/proc/{thread}/stat").read_text("ascii", "replace")
    except OSError:
        return False  # not visible from here
    return bool(int(text.rpartition(")")[2].split()[_PENDING]) & _KILL)


def is_nfs_server(thread: int) -> bool:
    """Whether an NFS server asks. Reads two small files of /proc, some 30 us.

    With `publish=close` a new file has no name before its writer has closed it. This is for
    programs. An NFS server looks up its new file by name (nfs-ganesha's FSAL_VFS, vfs_open2). It
    also keeps the file open for as long as it likes, even after its client's CLOSE, so its client's
    rename would be ENOENT. Therefore files of an NFS server have their names at once.
    """
    try:
        name = Path(f"/proc/{process_of(thread)}/comm").read_text("utf-8", "replace")
    except OSError:
        return False
    return name.strip() in NFS_SERVERS


class Waits:
    """The waits under way."""

    def __init__(self) -> None:
        self._threads: dict[trio.CancelScope, int] = {}

    @contextlib.contextmanager
    def unless_killed(self, thread: int) -> Iterator[trio.CancelScope]:
        """Wait in the block; its scope says whether the wait was cut short."""
        with trio.CancelScope() as scope:
            self._threads[scope] = thread
            try:
                yield scope
            finally:
                del self._threads[scope]

    async def watch(self) -> None:
        """End the waits of killed threads, as long as the mount lives."""
        while True:
            await trio.sleep(PERIOD)
            for scope, thread in list(self._threads.items()):
                if killed(thread):
                    scope.cancel()
                await trio.lowlevel.checkpoint()
