"""What a mover does for the bucket: an object comes down, and is what was sealed.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises StoreError, TierError of `compression`, OSError; nothing is left behind.
It is not synced: after a crash its digest has to tell.
`stream` has the file read while it comes. It says which chunks of the half made file are there,
each of them proven, and is told which ones somebody waits for. Both go through pipes of the daemon,
which this process opens by their numbers; when the daemon dies the next word to it fails, and with
it the job. The file has no name before it is whole: a mover that outlives its daemon and the one of
the next daemon have nothing in common, and none leaves anything behind. An object whose chunks have
no digests comes as by `download`; that is said first.
Not for choosing what comes down, nor for what is done with a chunk that is there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement import copying, publishing
from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, part
from kvfs.s3 import chunked
from kvfs.s3.errors import ObjectChangedError
from kvfs.s3.transfer import Transfers


def download(
    transfers: Transfers,
    stored: Stored,
    destination: str,
    size: int,
    digest: bytes,
    touched_ns: int,
) -> Moved:
    """Fetch an object of `size` bytes, as its readers see them, with this xxh3-128.

    If it has another ETag by now it must say of itself that it has the same bytes.
    """
    if failpoints.active:
        failpoints.reach("movement.download")
    with part(destination) as out:
        if size:
            os.truncate(out, size)  # tells tmpfs that huge pages will be within the size
        try:
            spent = _fetch(transfers, stored, out, destination, size, digest)
        except ObjectChangedError:
            now, *_ = publishing.as_it_is_now(transfers, stored, digest)
            spent = _fetch(transfers, now, out, destination, size, digest)
        os.utime(out, ns=(touched_ns, touched_ns))
        if failpoints.active:
            failpoints.reach("movement.download.written")
        blocks = os.fstat(out).st_blocks
        complete(destination)
    if failpoints.active:
        failpoints.reach("movement.download.renamed")
    return Moved(digest, blocks, spent)


def _fetch(
    transfers: Transfers, stored: Stored, out: int, destination: str, size: int, digest: bytes
) -> float:
    """Processor time of decompressing, in seconds."""
    if stored.codec != "none":
        return _decompressed(transfers, stored, out, destination, size, digest)
    transfers.download(stored.key, out, size, etag=stored.etag, digest=digest)
    return 0.0


def _decompressed(
    transfers: Transfers, stored: Stored, out: int, destination: str, size: int, digest: bytes
) -> float:
    """Processor time in seconds."""
    from kvfs.compression.files import decompress  # noqa: PLC0415 (who needs it loads it)

    packed = os.open(os.path.dirname(destination), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        transfers.download(stored.key, packed, stored.size, etag=stored.etag, digest=stored.digest)
        spent = decompress(stored.codec, packed, out, size, stored.size)
    finally:
        os.close(packed)
    transfers.expect_bytes(stored.key, copying.digest_of(out, size, sparse=False), digest)
    return spent


_WORD = Struct("<BQ")  # fewer bytes than a pipe takes at once, so none is ever half
_READ = _WORD.size * 512


class Say(IntEnum):
    """What a word is about. Its number is a chunk's, if nothing else is said."""

    WHOLE = 0  # it comes as a whole, nothing will be said of chunks; number 0
    BEGUN = 1  # there is a file, and nothing in it yet; number as `path_of` reads it
    HERE = 2
    WANTED = 3


class Word(NamedTuple):
    """One message, of either side."""

    say: Say
    number: int = 0


class Ends(NamedTuple):
    """Paths of the pipes' ends that are the mover's: to write to the daemon, to read from it."""

    tell: str
    hear: str


def tell(pipe: int, word: Word) -> None:
    """Raises OSError: BrokenPipeError if nobody is there, BlockingIOError if it is full."""
    os.write(pipe, _WORD.pack(*word))


def hear(pipe: int) -> list[Word]:
    """What has been said; the pipe does not block. Raises OSError."""
    try:
        data = os.read(pipe, _READ)
    except BlockingIOError:
        return []
    return [Word(Say(say), number) for say, number in _WORD.iter_unpack(data)]


@contextmanager
def _opened(ends: Ends) -> Iterator[tuple[int, int]]:
    out = os.open(ends.tell, os.O_WRONLY | os.O_CLOEXEC)
    try:
        inp = os.open(ends.hear, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield out, inp
        finally:
            os.close(inp)
    finally:
        os.close(out)


def stream(
    transfers: Transfers,
    stored: Stored,
    destination: str,
    size: int,
    digest: bytes,
    touched_ns: int,
    ends: Ends,
) -> Moved:
    """Fetch an object that is stored as it is read, `size` bytes with this xxh3-128.

    If it has another ETag, or gets one meanwhile, it must say that it has the same bytes.
    """
    with _opened(ends) as (out, inp):
        now, chunks, _ = publishing.as_it_is_now(transfers, stored, digest)
        if chunks is None:
            tell(out, Word(Say.WHOLE))
            return download(transfers, now, destination, size, digest, touched_ns)
        if failpoints.active:
            failpoints.reach("movement.stream")
        folder = os.path.dirname(destination)
        part = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(part, size)  # tells tmpfs that huge pages will be within the size
            tell(out, Word(Say.BEGUN, os.getpid() << 32 | part))
            chunked.download(
                *(transfers, stored.key, part, size),
                etag=now.etag,
                digest=digest,
                chunks=chunks,
                renewed=lambda: publishing.as_it_is_now(transfers, stored, digest)[0].etag,
                wanted=lambda: [word.number for word in hear(inp)],
                arrived=lambda number: tell(out, Word(Say.HERE, number)),
            )
            os.utime(part, ns=(touched_ns, touched_ns))
            _name(part, destination)
            return Moved(digest, os.fstat(part).st_blocks)
        finally:
            os.close(part)


def _name(fd: int, path: str) -> None:
    """Give a file that has none a name. What a dead daemon's mover has left there goes."""
    Path(path).unlink(missing_ok=True)
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=folder)  # without it Python has link(2), not linkat(2)
    finally:
        os.close(folder)


def path_of(word: Word) -> str:
    """Where the file is that has BEGUN, as long as its mover lives."""
    return f"/proc/{word.number >> 32}/fd/{word.number & (1 << 32) - 1}"
