"""Blocks of one save, which the mount makes many at a time, to be written past the kernel's names.

Contract: from `begin` on the mount is asked for some more than are being written; `take` waits
until it has come to a block, and gives a descriptor of it, once, which is the caller's to close: -1
is a block that is to be made by name, and so are all after it. `written` says that it is closed and
has all it should have; with `end` the mount has sealed what was written, and what was not is gone.
Any number of threads. Never raises OSError.
Not for what the bytes are, nor for the order in which they are written.
"""

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvfs import leasing
from kvfs.client.leases import Leases, Lent

# Blocks of the first question and of each further one, and how many are made before they are
# needed, for which room is set aside. Not measured against others.
FIRST_ASKED, MORE_ASKED, AHEAD = 2, 8, 8
_MODE = 0o666  # of a new file, before the umask
_UMASK = re.compile(rb"^Umask:\s*([0-7]+)$", re.MULTILINE)


class Made:
    """Blocks of `size` bytes that follow `parent`, and have these paths."""

    def __init__(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        paths: Sequence[str],
        shard: str,
        size: int,
        leases: Leases,
    ) -> None:
        self._above = [parent, *keys]
        self._paths = paths
        self._shard = shard
        self._size = size
        self._leases = leases
        self._mode = 0
        self._more = threading.Condition()
        self._known = 0  # of these it is known whether they are lent
        self._over = True  # no more is asked for
        self._asking = False
        self._taken = 0
        self._lent: dict[int, int] = {}  # block -> descriptor
        self._held: dict[int, int] = {}  # block -> lease
        self._sealing = 0
        self.count = 0  # lent, from the first on
        self.sealed: set[int] = set()

    def begin(self) -> None:
        """Ask for the first ones, in the background."""
        if self._leases.makes and self._paths and (mode := _mode()) is not None:
            self._mode, self._over = mode, False
            self._ask(FIRST_ASKED)

    def take(self, at: int) -> int:
        """Return a descriptor to write it by, or -1."""
        with self._more:
            self._taken = max(self._taken, at + 1)
            self._ask_ahead()
            self._more.wait_for(lambda: at < self._known or self._over)
            return self._lent.pop(at, -1)

    def written(self, at: int) -> None:
        """All of it, and its descriptor is closed."""
        with self._more:
            self._sealing += 1
            lease = self._held.pop(at)
        self._leases.done(lease, partial(self._done, at))

    def end(self) -> None:
        """Wait until all that was written is sealed: `sealed`. The rest is given back."""
        with self._more:
            self._over = True
            self._more.wait_for(lambda: not self._asking and not self._sealing)
            lent, self._lent = self._lent, {}
            held, self._held = self._held, {}
        for fd in lent.values():
            os.close(fd)
        self._leases.drop(held.values())

    def _ask_ahead(self) -> None:
        if not self._over and not self._asking and self._known < self._taken + AHEAD:
            self._ask(MORE_ASKED)

    def _ask(self, most: int) -> None:
        start = self._known
        above, *keys = self._above[start : start + most + 1]
        self._asking = True
        request = leasing.Request(above, keys, self._shard, self._size, mode=self._mode)
        self._leases.ask(request, partial(self._answered, len(keys)))

    def _answered(self, asked: int, found: Lent) -> None:
        """By the thread that asks."""
        with self._more:
            for at, (fd, lease) in enumerate(found, self._known):
                self._held[at] = lease
                self._lent[at] = fd
            self.count += len(found)
            self._known += len(found)
            self._asking = False
            if len(found) < asked or self._known == len(self._paths):
                self._over = True
            self._ask_ahead()
            self._more.notify_all()

    def _done(self, at: int, sealed: bool) -> None:  # noqa: FBT001 (a callback)
        """By the thread that asks. If not all of a question are, each has to be looked at."""
        if not sealed:
            with suppress(OSError):
                sealed = os.stat(self._paths[at]).st_size == self._size
        with self._more:
            if sealed:
                self.sealed.add(at)
            self._sealing -= 1
            self._more.notify_all()


def _mode() -> int | None:
    """Of the files that this process makes; to ask for the umask otherwise is to change it."""
    try:
        found = _UMASK.search(Path("/proc/self/status").read_bytes())
    except OSError:
        return None
    return None if found is None else _MODE & ~int(found[1], 8)
