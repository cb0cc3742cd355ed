"""Scans: processes that read only the first bytes of files, as connectors do when they start.

Contract: a process scans a directory once it has listed it, until it has neither listed nor opened
anything for PAUSE seconds. A process that reads on in nearly all files that it opens is a reader
(`cp -r`). A reader scans nothing until it has rested from listing for PAUSE seconds. `caller` is
the thread that asks, as in `open_order`.

A wrong guess costs a reader one small request, and a scanner an ordinary open. The state is in
memory only, at most DIRECTORIES numbers each for PROCESSES: the next daemon knows of no scan.
Not for processes that open files which other processes have listed.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import trio

from kvfs.catalog import Inode
from kvfs.core.namespaces.open_order import caller

# s. An open may wait `s3_wait` (30) for the bucket, and the next one follows it at once. An engine
# that opens files later than PAUSE after its listing reads blocks, not headers. Not measured.
PAUSE = 60.0
FEW = 2  # files that a reader with several threads may have opened since it last read on in one
PROCESSES, DIRECTORIES = 32, 2048  # 8 MB together


@dataclass(slots=True)
class _Scan:
    """The directories that a process has listed, the latest last.

    `opened`: the number of files that the process has opened since it last read on.
    """

    last: float
    directories: OrderedDict[int, None] = field(default_factory=OrderedDict)
    opened: int = 0
    reader: bool = False


class Scans:
    """The scans under way, by process."""

    def __init__(self) -> None:
        self._scans: OrderedDict[int, _Scan] = OrderedDict()

    def listed(self, directory: int) -> None:
        """Note that the caller lists a directory, or continues to."""
        process = process_of(caller.get())
        if not process:
            return
        scan = self._of(process) or _Scan(0.0)
        scan.last = trio.current_time()
        scan.directories[directory] = None
        scan.directories.move_to_end(directory)
        if len(scan.directories) > DIRECTORIES:
            scan.directories.popitem(last=False)
        self._scans[process] = scan
        if len(self._scans) > PROCESSES:
            self._scans.popitem(last=False)

    def opens(self, inode: Inode) -> bool:
        """Whether the caller, which opens this file, likely reads only its first bytes."""
        scan = self._of(process_of(caller.get())) if self._scans else None
        if scan is None or scan.reader:
            return False
        if not any(parent in scan.directories for parent, _ in inode.links):
            return False
        scan.last = trio.current_time()
        scan.opened += 1
        return True

    def read_on(self) -> None:
        """Note that the caller reads more than the first bytes of a file that it scanned."""
        scan = self._of(process_of(caller.get())) if self._scans else None
        if scan is not None:
            scan.reader |= scan.opened <= FEW
            scan.opened = 0

    def _of(self, process: int) -> _Scan | None:
        """Return a process's scan and make it the latest; None without one, or after a rest."""
        scan = self._scans.get(process)
        if scan is None:
            return None
        if trio.current_time() > scan.last + PAUSE:
            del self._scans[process]
            return None
        self._scans.move_to_end(process)
        return scan


def process_of(thread: int) -> int:
    """Return a thread's process, or the thread if the daemon does not see it. 0: no process."""
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:
        return thread
    return int(status.partition(b"\nTgid:")[2].split(maxsplit=1)[0])
