"""What a mover does for the bucket: an object comes down, and is what was sealed.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. The file appears under its name only complete, with the right digest and the modification
time of every copy. Raises StoreError, TierError of `compression`, OSError; nothing is left behind.
It is not synced: after a crash its digest has to tell. Not for choosing what comes down.
"""

import os

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement import copying, publishing
from kvfs.movement.copying import Moved
from kvfs.movement.parts import complete, part
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
