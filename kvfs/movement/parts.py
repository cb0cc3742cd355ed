"""The files that a mover reads and makes.

Contract: `reading` opens a backing file, never a link. `part` makes a new file under a name that
nobody looks for, `complete` gives it its own. A failure within the block of `part` removes the
file. All of them raise OSError. Not for what is in the files.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PART = ".part"

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


class SourceChangedError(Exception):
    """The source is not (or no longer) the file that the job was about."""


@contextmanager
def reading(source: str) -> Iterator[int]:
    """Open a backing file to read it."""
    inp = os.open(source, _READ)
    try:
        yield inp
    finally:
        os.close(inp)


def expect_size(inp: int, source: str, size: int) -> os.stat_result:
    """Return the status of an open file. Raises SourceChangedError if it has another size."""
    found = os.fstat(inp)
    if found.st_size != size:
        raise SourceChangedError(f"{source} has {found.st_size} bytes, expected {size}")
    return found


@contextmanager
def part(destination: str) -> Iterator[int]:
    """Make a new file, to read and write it."""
    path = destination + PART
    out = os.open(path, _NEW, 0o600)
    try:
        yield out
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(out)


def complete(destination: str) -> None:
    """Give the file its name; it is removed if that fails."""
    path = destination + PART
    try:
        os.rename(path, destination)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise


def remove_parts(destinations: Sequence[str]) -> None:
    """Remove what a mover that was killed has left."""
    for destination in destinations:
        Path(destination + PART).unlink(missing_ok=True)
