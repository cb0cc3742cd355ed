"""The access log: reads, writes, renames, misses and drops of a mount as lines of JSON.

Contract: the log is off by default. While it is on, each line costs about 7 us. While it is off,
callers only test `on`. A thread writes the lines, so no task waits for a disk. At most QUEUED lines
wait for the thread. Further lines are counted (`lost`), and the next line tells their number. The
file is bounded: at half of its size it becomes FILE.1, and replaces the former one. Both files are
new, empty or access logs (`kvfs.preflight`). A file that is not an access log is neither appended
to nor renamed nor replaced. The forms of a line, by `op`:

    {"t": 1712.25, "op": "read", "key": "1a2b", "parent": "0", "size": 8192, "tier": "ram",
     "path": "namespace/dir/name"}

    write: the same without tier; absent: a looked up name that is not there, without size;
    drop: an object that kvfs dropped, with why (`Reason`) in place of the tier

    {"t": .., "op": "rename", "key": .., "parent": .., "path": ..,
     "old_key": "3c4d", "old_namespace": "namespace"}

    {"t": .., "op": "lost", "count": 3}

key, parent and old_key are as in `Inode`, in hexadecimal. Namespace and key together identify an
object: names below two namespaces may be the same. A write tells the name at the seal. A rename
tells the new name of a file whose name gives it another key. The line of a rename may tell of a
file that no line has named before. A takeover continues the same file. Not for counting.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvfs import preflight
from kvfs.catalog import Batch, Inode
from kvfs.core.namespaces.drops import Reason
from kvfs.core.namespaces.order import key_of
from kvfs.core.namespaces.places import Places
from kvfs.errors import ConfigError, KvfsError

log = logging.getLogger(__name__)

QUEUED = 1 << 16  # lines, about 30 MB
PATIENCE = 5.0  # s to write the waiting lines at the end
NAMES = 1024  # notes until the names of namespaces are looked up again

Line = dict[str, Any]


class AccessLog:
    """The log of one mount. `name(ino)` gives the name of a namespace."""

    def __init__(self, places: Places, name: Callable[[int], str]) -> None:
        self.places = places
        self.on = False
        self.lost = 0
        self._name = name
        self._names: dict[int, str] = {}
        self._noted = 0
        self._lines: queue.Queue[Line | None] = queue.Queue(QUEUED)
        self._writer: _Writer | None = None

    def change(self, path: Path | None, size: int) -> None:
        """Begin the log, continue it in another file, or end it. Waits for a disk. ConfigError."""
        writer = None if path is None else _Writer(path, size, self._lines)
        self.on = False
        if self._writer is not None:
            self._writer.stop()
        self._writer = writer
        if writer is not None:
            writer.start()
            self.on = True

    def read(self, inode: Inode, tier: str) -> None:
        """Log that an object was opened to read, from a tier."""
        self._note(self._about("read", inode) | {"tier": tier})

    def written(self, inode: Inode) -> None:
        """Log that an object is complete."""
        self._note(self._about("write", inode))

    def dropped(self, inode: Inode, reason: Reason, batch: Batch) -> None:
        """Log that kvfs drops an object, once the batch is committed. It has its names yet."""
        batch.then(partial(self._note, self._about("drop", inode) | {"why": reason}))

    def renamed(
        self, before: Inode, inode: Inode, directory: Inode, name: bytes, batch: Batch
    ) -> None:
        """Log that a file has another key by its new name, once the batch is committed.

        before: its record before it got the name. The same key: nothing is logged.
        """
        if (before.namespace, key_of(before)) == (inode.namespace, key_of(inode)):
            return
        line = {
            "op": "rename",
            "key": f"{key_of(inode):x}",
            "parent": f"{inode.parent_key:x}",
            "path": self._path(inode.namespace, self.places.path(directory), name),
            "old_key": f"{key_of(before):x}",
            "old_namespace": self._space(before.namespace),
        }
        batch.then(partial(self._note, line))

    def absent(self, directory: Inode, name: bytes) -> None:
        """Log that a program looked up a name that is not there."""
        key, parent = self.places.keys(directory, name)
        path = self._path(directory.namespace, self.places.path(directory), name)
        self._note({"op": "absent", "key": f"{key:x}", "parent": f"{parent:x}", "path": path})

    def _about(self, what: str, inode: Inode) -> Line:
        found = self.places.path_of(inode) or (b"",)  # its name may be gone, not its namespace
        path = self._path(inode.namespace, found[:-1], found[-1])
        key, parent = key_of(inode), inode.parent_key
        return {
            "op": what,
            "key": f"{key:x}",
            "parent": f"{parent:x}",
            "size": inode.size,
            "path": path,
        }

    def _path(self, namespace: int, directory: tuple[bytes, ...], name: bytes) -> str:
        return f"{self._space(namespace)}/{os.fsdecode(b'/'.join((*directory, name)))}"

    def _space(self, namespace: int) -> str:
        self._noted += 1
        if self._noted % NAMES == 0:
            self._names.clear()
        space = self._names.get(namespace)
        if space is None:
            space = self._names[namespace] = self._name(namespace)
        return space

    def _note(self, line: Line) -> None:
        line["t"] = round(time.time(), 4)
        try:
            if self.lost:
                self._lines.put_nowait({"t": line["t"], "op": "lost", "count": self.lost})
                self.lost = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1


class _Writer(threading.Thread):
    """The thread that writes one file."""

    def __init__(self, path: Path, size: int, lines: "queue.Queue[Line | None]") -> None:
        """Raises ConfigError."""
        super().__init__(name="access log", daemon=True)
        self.path = path
        self.half = size // 2
        self._lines = lines
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"access_log={path} cannot be written: {error.strerror}, expected a file in a "
                f"directory where uid {os.geteuid()} may write"
            ) from error

    def _open(self) -> IO[bytes]:
        preflight.check_access_file(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.fdopen(os.open(self.path, flags, 0o600), "ab")
        try:
            preflight.expect_accesses(self.path, file.fileno())  # not a file put there meanwhile
        except ConfigError:
            file.close()
            raise
        if file.tell():
            file.write(b"\n")  # a death may have torn the last line
        return file

    def stop(self) -> None:
        """Stop after the waiting lines are written; the next writer takes the queue over."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=PATIENCE)
            self.join(PATIENCE)

    def run(self) -> None:
        said = False
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, KvfsError) as error:
                if not said:
                    log.error("access_log=%s is not written (said once): %s", self.path, error)
                said = True
        self._file.close()

    def _write(self, line: Line) -> None:
        if self._file.tell() >= self.half:
            self._turn_over()
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if self._lines.empty():
            self._file.flush()

    def _turn_over(self) -> None:
        """Begin a new file. Raises OSError, ConfigError; then the next line tries again."""
        older = preflight.older(self.path)
        preflight.check_access_file(older)
        self._file.flush()
        with suppress(FileNotFoundError):  # a user has moved it away
            if os.path.samestat(self.path.lstat(), os.fstat(self._file.fileno())):
                self.path.rename(older)
        fresh = self._open()
        self._file.close()
        self._file = fresh
