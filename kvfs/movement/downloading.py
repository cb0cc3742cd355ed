"""Downloads by a mover: it fetches an object from the bucket and verifies its digest.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises StoreError, TierError of `compression`, OSError; nothing is left behind.
The file is not synced: after a crash its digest decides.

`stream` lets programs read the file during the download. It verifies each chunk, and then tells the
daemon that the chunk is in the file. The daemon tells it which chunks programs wait for. Both use
pipes of the daemon, which this process opens by path. When the daemon dies, the next word to it
fails, and so does the job. The file has no name before it is complete. So a mover that outlives its
daemon does not disturb the mover of the next daemon, and neither of them leaves anything behind. If
the chunks have no digests, `stream` says so first, and continues as `download`. Not for choosing
downloads, nor for using a chunk that is there.
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


class DownloadJob(NamedTuple):
    """The source and the destination of a download.

    stored: the object in the bucket. size, digest: of the object as its readers see it. touched_ns:
    the modification time that the copy gets.
    """

    stored: Stored
    destination: str
    size: int
    digest: bytes
    touched_ns: int


def download(transfers: StoreTransfers, wanted: DownloadJob) -> Moved:
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


def _fetch(transfers: StoreTransfers, wanted: DownloadJob, out: int) -> float:
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


def stream(transfers: StoreTransfers, wanted: DownloadJob, ends: Ends) -> Moved:
    """Fetch an uncompressed object, and tell the daemon of each chunk that is here.

    The ETag of the object may change at any time.
    """
    stored, destination, size, digest, touched_ns = wanted
    with (
        opened(ends.tell, os.O_WRONLY) as out,
        opened(ends.hear, os.O_RDONLY | os.O_NONBLOCK) as inp,
    ):
        now, chunks, _ = publishing.as_it_is_now(transfers, stored, digest)
        if chunks is None:
            tell(out, Word(WordKind.WHOLE))
            return download(transfers, wanted._replace(stored=now))
        with nameless(destination) as coming:
            os.truncate(coming, size)  # tells tmpfs that huge pages will be within the size
            tell(out, Word(WordKind.BEGUN, os.getpid() << 32 | coming))
            chunked.download(
                *(transfers, stored.key, coming, size),
                etag=now.etag,
                digest=digest,
                chunks=chunks,
                renewed=lambda: publishing.as_it_is_now(transfers, stored, digest)[0].etag,
                wanted=lambda: [word.number for word in hear(inp)],
                arrived=lambda number: tell(out, Word(WordKind.HERE, number)),
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
