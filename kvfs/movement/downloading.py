"""Downloads by a mover: it fetches an object from the bucket and verifies its digest.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises StoreError, TierError of `compression`, OSError; nothing is left behind.
The file is not synced: after a crash its digest decides.

`stream` lets readers read the file while it comes. It tells the daemon which chunks of the
half-made file are there, each of them verified, and the daemon tells it which chunks readers wait
for. Both use pipes of the daemon, which this process opens by their numbers. When the daemon dies,
the next word to it fails, and the job with it. The file has no name before it is complete. So a
mover that outlives its daemon does not disturb the mover of the next daemon, and neither leaves
anything behind. An object whose chunks have no digests comes as by `download`; `stream` tells this
first. Not for choosing downloads, nor for using a chunk that is there.
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
from kvfs.s3.transfer import StoreTransfers


class Wanted(NamedTuple):
    """An object of `size` bytes, as its readers see them; its xxh3-128 and its destination."""

    stored: Stored
    destination: str
    size: int
    digest: bytes
    touched_ns: int


def download(transfers: StoreTransfers, wanted: Wanted) -> Moved:
    """Fetch an object.

    If its ETag has changed, its metadata must say that it has the same bytes.
    """
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


def _fetch(transfers: StoreTransfers, wanted: Wanted, out: int) -> float:
    """Fetch the bytes; return the processor time of decompressing, in seconds."""
    stored, _, size, digest, _ = wanted
    if stored.codec == "none":
        transfers.download(stored.key, out, size, etag=stored.etag, digest=digest)
        return 0.0

    from kvfs.compression.files import decompress  # noqa: PLC0415 (only its users load it)

    with nameless(wanted.destination) as packed:
        transfers.download(stored.key, packed, stored.size, etag=stored.etag, digest=stored.digest)
        spent = decompress(stored.codec, packed, out, size, stored.size)
    transfers.expect_bytes(stored.key, copying.digest_of(out, size, sparse=False), digest)
    return spent


_WORD = Struct("<BQ")  # a pipe takes this many bytes at once, so no word is ever cut
_READ = _WORD.size * 512


class Say(IntEnum):
    """The kind of a word. Its number is a chunk's, unless the kind says otherwise."""

    WHOLE = 0  # the object comes as a whole, no words on chunks follow; number 0
    BEGUN = 1  # there is a file, with nothing in it yet; number as `path_of` reads it
    HERE = 2
    WANTED = 3


class Word(NamedTuple):
    """One message, of the daemon or of the mover."""

    say: Say
    number: int = 0


class Ends(NamedTuple):
    """Paths of the mover's ends of the pipes: to write to the daemon, to read from it."""

    tell: str
    hear: str


def tell(pipe: int, word: Word) -> None:
    """Send a word.

    Raises OSError: BrokenPipeError if the reader is gone, BlockingIOError if full.
    """
    os.write(pipe, _WORD.pack(*word))


def hear(pipe: int) -> list[Word]:
    """The words received so far; the pipe does not block. Raises OSError."""
    try:
        data = os.read(pipe, _READ)
    except BlockingIOError:
        return []
    return [Word(Say(say), number) for say, number in _WORD.iter_unpack(data)]


def stream(transfers: StoreTransfers, wanted: Wanted, ends: Ends) -> Moved:
    """Fetch an object that is stored uncompressed. Its ETag may change at any time."""
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
            # Remove the file that a dead daemon's mover has left there.
            Path(destination).unlink(missing_ok=True)
            with opened("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY) as folder:
                # Without a directory Python has link(2), not linkat(2).
                os.link(str(coming), destination, src_dir_fd=folder)
            return Moved(digest, os.fstat(coming).st_blocks)


def path_of(word: Word) -> str:
    """The path of the file of a BEGUN word, as long as its mover lives."""
    return f"/proc/{word.number >> 32}/fd/{word.number & (1 << 32) - 1}"
