"""Who reads the beginnings of files only: connectors that look through a directory as they start.

Contract: a process scans a directory once it has listed it, until it has neither listed nor opened
anything for PAUSE seconds. One that reads on in nearly all that it opens is a reader (`cp -r`), and
scans nothing until it rests from listing for as long. Who asks is `caller`, as in `open_order`.
A wrong guess costs a reader one small request, or a scanner what an open costs anybody. It is in
memory only, at most DIRECTORIES numbers each for PROCESSES: the next daemon knows of no scan.
Not for processes that open what others have listed for them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import trio

from kvfs.catalog import Inode
from kvfs.core.namespaces.open_order import caller

# s. An open may wait `s3_wait` (30) for the bucket, and the next one follows it at once; who begins
# to serve later than that after its listing reads blocks, not headers. No measurement behind it.
PAUSE = 60.0
FEW = 2  # files that a reader with several threads may have opened since it last read on in one
PROCESSES, DIRECTORIES = 32, 2048  # 8 MB together


@dataclass(slots=True)
class _Scan:
    """Of a process: what it has listed, the latest last. `opened`: files, since it last read on."""

    last: float
    directories: OrderedDict[int, None] = field(default_factory=OrderedDict)
    opened: int = 0
    reader: bool = False


class Scans:
    """Those under way, by process."""

    def __init__(self) -> None:
        self._scans: OrderedDict[int, _Scan] = OrderedDict()

    def listed(self, directory: int) -> None:
        """The caller lists a directory, or goes on to."""
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
        """Whether the caller, who opens this file, will hardly read more than its beginning."""
        scan = self._of(process_of(caller.get())) if self._scans else None
        if scan is None or scan.reader:
            return False
        if not any(parent in scan.directories for parent, _ in inode.links):
            return False
        scan.last = trio.current_time()
        scan.opened += 1
        return True

    def read_on(self) -> None:
        """The caller reads more than the beginning of what it was said to scan."""
        scan = self._of(process_of(caller.get())) if self._scans else None
        if scan is not None:
            scan.reader |= scan.opened <= FEW
            scan.opened = 0

    def _of(self, process: int) -> _Scan | None:
        """That of a process, which is the latest now; None if it has none, or has rested."""
        scan = self._scans.get(process)
        if scan is None:
            return None
        if trio.current_time() > scan.last + PAUSE:
            del self._scans[process]
            return None
        self._scans.move_to_end(process)
        return scan


def process_of(thread: int) -> int:
    """The process of a thread; the thread itself where the daemon does not see it. 0: nobody."""
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:
        return thread
    return int(status.partition(b"\nTgid:")[2].split(maxsplit=1)[0])
