"""A trace played against directories, with real files instead of KV blocks.

Contract: `replay` looks up the blocks of a prompt in order from its beginning. It opens each
block's file, and reads and compares it to its last byte. It writes a missing block immediately, to
a name that ends in .tmp, and renames it. These are the lookups of `sweep.simulate`, so that both
count the same. The trace's clock matters only with a speed. A file's bytes follow from its key: any
other byte is a ReplayError. A block that cannot be stored (ENOSPC, EDQUOT) is counted, because an
engine would go on without it. With several directories, a route names the directory of each
request: they are those of the nodes of a pool, and a block of one may be a hit at another.

Names are prefix paths, PARENT/KEY. A key is the trace's hash id + 1 in 16 hexadecimal digits with
as many zeros behind. The parent of a prompt's first block is 0. Not for measuring speed.
"""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from kvfs.clock import REAL, Clock
from kvfs.errors import ConfigError, KvfsError
from kvfs.simulation.trace import Advance, Hits, Prompt, unheard

SMALLEST_BLOCK = 4096  # bytes: a page, the least that a file takes
_OURS = re.compile(r"[0-9a-f]{16}0{16}(\.part\.tmp)?")


class ReplayError(KvfsError):
    """The directory gave wrong bytes, or failed."""


class Replayed(NamedTuple):
    """The hits, and the results of storing the other blocks."""

    hits: Hits
    stored: int  # blocks
    refused: int  # blocks for which there was no room
    seconds: float


def content(key: int, size: int) -> bytes:
    """Return the bytes of a block: SHAKE128 of its key, as 8 bytes little-endian."""
    return hashlib.shake_128(key.to_bytes(8, "little")).digest(size)


def name(key: int, parent: int) -> str:
    """Return the path of a block."""
    return f"{_name(parent)}/{_name(key)}"


def _name(key: int) -> str:
    return f"{key:016x}{0:016x}"


@contextlib.contextmanager
def directory(root: Path, namespace: str, *, keep: bool) -> Iterator[Path]:
    """Give an empty directory below root; remove its blocks afterwards, and it if it was made.

    An existing directory is used if it is empty, so that it may have a quota of its own. Raises
    ConfigError, and ReplayError if it cannot be removed; that is a note to the error in the block,
    if there was one.
    """
    if not namespace or namespace in {".", ".."} or "/" in namespace or "\0" in namespace:
        raise ConfigError(f"namespace {namespace!r}: expected the name of one directory")
    path = root / namespace
    made = True
    try:
        try:
            path.mkdir()
        except FileExistsError:
            made = False
            if next(path.iterdir(), None) is not None:
                raise ConfigError(
                    f"{path} is not empty, and its files would count: give another --namespace"
                ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    try:
        yield path
    except BaseException as first:
        if not keep:
            try:
                _remove(path, made=made)
            except ReplayError as second:
                first.add_note(str(second))
        raise
    if not keep:
        _remove(path, made=made)


def _remove(path: Path, *, made: bool) -> None:
    try:
        for parent in filter(_OURS.fullmatch, os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):  # it was dropped meanwhile
                for found in filter(_OURS.fullmatch, os.listdir(path / parent)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path / parent / found)
                os.rmdir(path / parent)
        if made:
            path.rmdir()
    except FileNotFoundError:
        return  # its namespace was dropped
    except OSError as error:
        raise ReplayError(f"{path} could not be removed: {error.strerror or error}") from error


def replay(
    requests: Iterable[Prompt],
    folders: Sequence[Path],
    block_size: int,
    *,
    routes: Iterable[int] | None = None,
    speed: float | None = None,
    advance: Advance = unheard,
    clock: Clock = REAL,
) -> Replayed:
    """Play the requests, at `speed` times the trace's pace or as fast as possible.

    routes: for each request, the number of its folder; by default all are of the first. Raises
    ReplayError.
    """
    hits, stored, refused = Hits(), 0, 0
    began = clock.now()
    for request, number in zip(requests, repeat(0) if routes is None else routes, strict=False):
        if speed is not None:
            due = began + request.timestamp_ms / 1000 / speed
            clock.sleep(max(0.0, due - clock.now()))
        parent, found = 0, []
        for key in request.keys:
            path = folders[number] / name(key, parent)
            hit = _found(path, key, block_size)
            found.append(hit)
            if not hit:
                done = _store(path, key, block_size)
                stored += done
                refused += not done
            parent = key
        hits = hits.and_request(request, found)
        advance(1)
    return Replayed(hits, stored, refused, clock.now() - began)


def _found(path: Path, key: int, size: int) -> bool:
    try:
        with path.open("rb") as file:
            data = file.read(size + 1)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    expected = content(key, size)
    if data == expected:
        return True
    if len(data) != size:
        more = " or more" if len(data) > size else ""
        raise ReplayError(f"{path} has {len(data)} bytes{more}, expected {size}")
    at = next(i for i, (one, other) in enumerate(zip(data, expected, strict=True)) if one != other)
    raise ReplayError(f"{path} has wrong bytes from offset {at}")


def _store(path: Path, key: int, size: int) -> bool:
    """Store a block and return whether there was room."""
    part = path.with_name(f"{path.name}.part.tmp")
    try:
        try:
            path.parent.mkdir(exist_ok=True)
            with part.open("xb") as file:
                file.write(content(key, size))
            part.rename(path)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            part.unlink(missing_ok=True)
            return False
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from error
    return True
