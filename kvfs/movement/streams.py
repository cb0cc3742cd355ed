"""A file that programs read while a mover fills it: what the mover and the daemon tell each other.

Contract: the mover verifies each chunk, and then tells the daemon that the chunk is in the file.
The daemon tells it which chunks programs wait for. Both use pipes of the daemon, which the mover
opens by path. When the daemon dies, the next word to it fails, and so does the job. The file has no
name before it is complete. So a mover that outlives its daemon does not disturb the mover of the
next daemon, and neither of them leaves anything behind. All calls raise OSError. Not for the source
of the bytes (`downloading`, `kvfs.pool.streaming`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from kvfs.movement.files import nameless, opened

_WORD = Struct("<BQ")  # a pipe takes this many bytes at once, so a read gets whole words
_READ = _WORD.size * 512


class WordKind(IntEnum):
    """The kind of a word. The word's number is the number of a chunk, except as said here."""

    WHOLE = 0  # the chunks have no digests: no words on chunks follow; number 0
    BEGUN = 1  # the file exists, still empty; `path_of` makes its path from the number
    HERE = 2  # of the mover: the chunk is in the file
    WANTED = 3  # of the daemon: a program waits for the chunk


class Word(NamedTuple):
    """One message, of the daemon or of the mover."""

    kind: WordKind
    number: int = 0


class Ends(NamedTuple):
    """Paths of the mover's ends of the pipes: to write to the daemon, to read from it."""

    tell: str
    hear: str


def tell(pipe: int, word: Word) -> None:
    """Send a word.

    Raises OSError: BrokenPipeError if the reader is gone, BlockingIOError if the pipe is full.
    """
    os.write(pipe, _WORD.pack(*word))


def hear(pipe: int) -> list[Word]:
    """The words received so far; the pipe does not block. Raises OSError."""
    try:
        data = os.read(pipe, _READ)
    except BlockingIOError:
        return []
    return [Word(WordKind(kind), number) for kind, number in _WORD.iter_unpack(data)]


def path_of(word: Word) -> str:
    """The path of the file of a BEGUN word, as long as its mover lives."""
    return f"/proc/{word.number >> 32}/fd/{word.number & (1 << 32) - 1}"


@contextmanager
def talking(ends: Ends) -> Iterator[tuple[int, int]]:
    """Open the mover's ends of the pipes: to write to the daemon, to read from it."""
    with (
        opened(ends.tell, os.O_WRONLY) as out,
        opened(ends.hear, os.O_RDONLY | os.O_NONBLOCK) as inp,
    ):
        yield out, inp


@contextmanager
def coming(destination: str, size: int, touched_ns: int, out: int) -> Iterator[int]:
    """Make a file without a name, tell the daemon of it, and give it its name at the end.

    out: the pipe to the daemon. The file gets no name if the block raises.
    """
    with nameless(destination) as found:
        os.truncate(found, size)  # tells tmpfs that huge pages will be within the size
        tell(out, Word(WordKind.BEGUN, os.getpid() << 32 | found))
        yield found
        os.utime(found, ns=(touched_ns, touched_ns))
        # Remove the file that a dead daemon's mover has left there.
        Path(destination).unlink(missing_ok=True)
        with opened("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY) as folder:
            # Without a directory Python has link(2), not linkat(2).
            os.link(str(found), destination, src_dir_fd=folder)
