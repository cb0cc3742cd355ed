"""Downloads by a mover: it fetches an object from the bucket and verifies its digest.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises StoreError, TierError of `compression`, OSError; nothing is left behind.
The file is not synced: after a crash its digest decides.

`stream` lets programs read the file during the download, as `streams` says. If the chunks have no
digests, `stream` says so first, and continues as `download`. Not for choosing downloads, nor for
using a chunk that is there.
"""

import os
from typing import NamedTuple

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement import copying, publishing, streams
from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, nameless, part
from kvfs.movement.streams import Ends, Word, WordKind, hear, tell
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


def stream(transfers: StoreTransfers, wanted: DownloadJob, ends: Ends) -> Moved:
    """Fetch an uncompressed object, and tell the daemon of each chunk that is here.

    The ETag of the object may change at any time.
    """
    stored, destination, size, digest, touched_ns = wanted
    with streams.talking(ends) as (out, inp):
        now, chunks, _ = publishing.as_it_is_now(transfers, stored, digest)
        if chunks is None:
            tell(out, Word(WordKind.WHOLE))
            return download(transfers, wanted._replace(stored=now))
        with streams.coming(destination, size, touched_ns, out) as coming:
            chunked.download(
                *(transfers, stored.key, coming, size),
                etag=now.etag,
                digest=digest,
                chunks=chunks,
                renewed=lambda: publishing.as_it_is_now(transfers, stored, digest)[0].etag,
                wanted=lambda: [word.number for word in hear(inp)],
                arrived=lambda number: tell(out, Word(WordKind.HERE, number)),
            )
            blocks = os.fstat(coming).st_blocks
        return Moved(digest, blocks)
