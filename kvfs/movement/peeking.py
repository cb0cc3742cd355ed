"""What a mover does for the bucket: the first bytes of an object come, without the rest.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. What is returned was compared with its digest. Raises StoreError, of which WrongBytesError,
MetadataError, NoObjectError and ObjectChangedError say that the object is another one, or damaged.
Not for objects that are stored compressed: what they begin with, no reader sees.
"""

from kvfs.catalog import Stored
from kvfs.movement import looking
from kvfs.s3 import header
from kvfs.s3.errors import ObjectChangedError, OutageError, WrongBytesError
from kvfs.s3.store import Head
from kvfs.s3.transfer import RANGE_TRIES, Transfers


def peek(transfers: Transfers, stored: Stored, size: int, digest: bytes) -> bytes:
    """The header of an object of `size` bytes with this xxh3-128; b"" if nothing proves it."""
    head, data = _ask(transfers, stored)
    where = f"{transfers.store.name}/{stored.key}"
    if not looking.is_same(head, stored, size, digest):
        raise ObjectChangedError(f"{where}: what is written beside it is of another object")
    wanted = header.of_metadata(stored.key, head.metadata)
    if wanted and not header.proven(data, wanted):
        raise WrongBytesError(
            f"{where}: its first {len(data)} bytes have another xxh3-128 than was stored beside it"
        )
    return data if wanted else b""


def _ask(transfers: Transfers, stored: Stored) -> tuple[Head, bytes]:
    for _ in range(RANGE_TRIES - 1):
        try:
            return transfers.store.peek(stored.key, header.SIZE, etag=stored.etag)
        except OutageError:  # a connection that broke, perhaps, in the middle of so few bytes
            continue
    return transfers.store.peek(stored.key, header.SIZE, etag=stored.etag)
