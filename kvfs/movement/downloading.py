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
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement import copying, publishing
from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, nameless, opened, part
from kvfs.s3 import chunked
from kvfs.s3.errors import ObjectChangedError
from kvfs.s3.transfer import Transfers


class Wanted(NamedTuple):
    """An object of `size` bytes, as its readers see them, with this xxh3-128; where it is to be."""

    stored: Stored
    destination: str
    size: int
    digest: bytes
    touched_ns: int


def download(transfers: Transfers, wanted: Wanted) -> Moved:
    """Fetch an object. If it has another ETag by now it must say that it has the same bytes."""
    failpoints.reach("movement.download")
    with part(wanted.destination) as out:
        if wanted.size:
            os.truncate(out, wanted.size)  # tells tmpfs that huge pages will be within the size
        try:
            spent = _fetch(transfers, wanted, out)
        except ObjectChangedError:
            now, *_ = publishing.as_it_is_now(transfers, wanted.stored, wanted.digest)
            spent = _fetch(transfers, wanted._replace(stored=now), out)
        os.utime(out, ns=(wanted.touched_ns, wanted.touched_ns))
        failpoints.reach("movement.download.written")
        blocks = os.fstat(out).st_blocks
        complete(wanted.destination)
    failpoints.reach("movement.download.renamed")
    return Moved(wanted.digest, blocks, spent)


def _fetch(transfers: Transfers, wanted: Wanted, out: int) -> float:
    """Processor time of decompressing, in seconds."""
    stored, _, size, digest, _ = wanted
    if stored.codec == "none":
        transfers.download(stored.key, out, size, etag=stored.etag, digest=digest)
        return 0.0

    from kvfs.compression.files import decompress  # noqa: PLC0415 (who needs it loads it)

    with nameless(wanted.destination) as packed:
        transfers.download(stored.key, packed, stored.size, etag=stored.etag, digest=stored.digest)
        spent = decompress(stored.codec, packed, out, size, stored.size)
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


def stream(transfers: Transfers, wanted: Wanted, ends: Ends) -> Moved:
    """Fetch an object that is stored as it is read. Its ETag may change at any time."""
    stored, destination, size, digest, touched_ns = wanted
    with (
        opened(ends.tell, os.O_WRONLY) as out,
        opened(ends.hear, os.O_RDONLY | os.O_NONBLOCK) as inp,
    ):
        now, chunks, _ = publishing.as_it_is_now(transfers, stored, digest)
        if chunks is None:
            tell(out, Word(Say.WHOLE))
            return download(transfers, wanted._replace(stored=now))
        with nameless(destination) as coming:
            os.truncate(coming, size)  # tells tmpfs that huge pages will be within the size
            tell(out, Word(Say.BEGUN, os.getpid() << 32 | coming))
            chunked.download(
                *(transfers, stored.key, coming, size),
                etag=now.etag,
                digest=digest,
                chunks=chunks,
                renewed=lambda: publishing.as_it_is_now(transfers, stored, digest)[0].etag,
                wanted=lambda: [word.number for word in hear(inp)],
                arrived=lambda number: tell(out, Word(Say.HERE, number)),
            )
            os.utime(coming, ns=(touched_ns, touched_ns))
            # What a dead daemon's mover has left there goes.
            Path(destination).unlink(missing_ok=True)
            with opened("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY) as folder:
                # Without a directory Python has link(2), not linkat(2).
                os.link(str(coming), destination, src_dir_fd=folder)
            return Moved(digest, os.fstat(coming).st_blocks)


def path_of(word: Word) -> str:
    """Where the file is that has BEGUN, as long as its mover lives."""
    return f"/proc/{word.number >> 32}/fd/{word.number & (1 << 32) - 1}"
