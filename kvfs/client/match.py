"""Counts the cached blocks of a prompt: one question to the mount, else bisection over stat.

Contract: an answer was true at some moment; `load` finds out which blocks are still there.
Bisection takes at most log2(blocks) + 2 stats for each shard. It is exact where prefixes are
closed, as a kvfs namespace with `prefix` keeps names. A prefix may have a hole on another file
system, or while a block is written in place. Then bisection finds the end of one of the runs, but
none with a hole that a load has found.

The mount answers by a hidden file of the namespace, in the format of `kvfs.matching`. It does not
know other nodes' blocks in a shared bucket before a program has looked them up. So stats look for
those behind the end of its answer. Not for the order of keys (`kvfs.prefix`).
"""

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvfs import matching, prefix
from kvfs.matching import KEYS_MAX

log = logging.getLogger(__name__)

HOLES_MAX = 1 << 16


class TierBytes(NamedTuple):
    """Bytes of the matched blocks: in RAM, on NVMe and not in RAM, only in the bucket."""

    ram: int
    nvme: int
    bucket: int

    def plus(self, other: "TierBytes") -> "TierBytes":
        return TierBytes(*map(sum, zip(self, other, strict=True)))


class MatchResult(NamedTuple):
    """The number of keys found, from the first, and their tiers, if the mount has said so."""

    blocks: int
    bytes: TierBytes | None


class Question:
    """The namespace's `.match`, kept open. Any number of threads may ask; they take turns."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{matching.NAME}"
        self._lock = threading.Lock()
        self._fd = -1  # closed with the last reference, if not before
        self.offered = True  # until an error shows that it is not
        with self._lock:
            self._open()

    def ask(
        self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str], size: int
    ) -> MatchResult | None:
        """Return the cached blocks, as files of `size` each; None if the mount does not say."""
        blocks, where = 0, TierBytes(0, 0, 0)
        for start in range(0, len(keys), KEYS_MAX):
            part = keys[start : start + KEYS_MAX]
            found = self._ask(keys[start - 1] if start else parent, part, shards, size)
            if found is None or found.bytes is None:
                return None
            blocks, where = blocks + found.blocks, where.plus(found.bytes)
            if found.blocks < len(part):
                break
        return MatchResult(blocks, where)

    def _ask(
        self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str], size: int
    ) -> MatchResult | None:
        question = matching.pack_request(parent, keys, shards, details=True)
        with self._lock:
            if not self.offered or (self._fd < 0 and not self._open()):
                return None
            try:
                os.pwrite(self._fd, question, 0)
                data = os.pread(self._fd, matching.answer_size(len(keys), details=True), 0)
            except OSError as error:
                log.info("%s: %s; asking by stat", self._path, error)
                self._close()
                return None
        answer = _parse(data, len(keys))
        if answer is None:
            log.warning(
                "%s gave %d bytes that are no answer: kvfs.client asks with stat",
                self._path,
                len(data),
            )
            self.offered = False
            return None
        wanted = size * len(shards)
        fitting = next((at for at, found in enumerate(answer.sizes) if found != wanted), None)
        if fitting is None:
            return MatchResult(answer.blocks, TierBytes(answer.ram, answer.nvme, answer.bucket))
        return self._ask(parent, keys[:fitting], shards, size)

    def close(self) -> None:
        with self._lock:
            self.offered = False
            self._close()

    def __del__(self) -> None:
        self._close()

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            log.debug("%s: %s; asking by stat", self._path, error)
            self.offered = False
        return self.offered

    def renew(self) -> None:
        """Reopen for the next question: another namespace may have the name by now."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the mount is gone; the number is free again
                os.close(fd)


def _parse(data: bytes, keys: int) -> matching.MatchAnswer | None:
    """Parse the answer about so many keys; None if it is none.

    A network file system might give the client's own question back.
    """
    try:
        answer = matching.unpack_answer(data)
    except ValueError:
        return None
    return answer if len(answer.sizes) == answer.blocks <= keys else None


class Bisection:
    """Stats of one directory, for files of one size. Any number of threads.

    If a prefix has a hole, a load finds the hole's block and reports it with `missed`. A match ends
    there until the block is there again.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._directory = directory
        self._size = size
        self._holes: set[bytes] = set()
        self._lock = threading.Lock()

    def ask(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> MatchResult:
        """Look for the first block, then the last, then between them."""

        def there(at: int) -> bool:
            return self._is_there(keys[at - 1] if at else parent, keys[at], shards)

        keys = keys[: self.before_hole(parent, keys, shards)]
        if not keys or not there(0):
            return MatchResult(0, None)
        if there(len(keys) - 1):
            return MatchResult(len(keys), None)
        low, high = 0, len(keys) - 1  # the first is there, the last is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if there(middle) else (low, middle)
        return MatchResult(low + 1, None)

    def before_hole(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> int:
        """Count the blocks before the first that was missed, and still is."""
        with self._lock:
            holes = [at for at, key in enumerate(keys) if key in self._holes] if self._holes else []
        for at in holes:
            if not self._is_there(keys[at - 1] if at else parent, keys[at], shards):
                return at
            with self._lock:
                self._holes.discard(keys[at])
        return len(keys)

    def _is_there(self, above: bytes, key: bytes, shards: Sequence[str]) -> bool:
        paths = (prefix.path(above, key, shard) for shard in shards)
        return all(_is_block(f"{self._directory}/{path}", self._size) for path in paths)

    def missed(self, key: bytes) -> None:
        """Note that a block is missing, although a match had found it."""
        with self._lock:
            if len(self._holes) >= HOLES_MAX:
                self._holes.clear()  # they will be found again
            self._holes.add(key)


def _is_block(path: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == size
    return False
