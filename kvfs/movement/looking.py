"""What a mover looks at in the bucket for a check: what is there, and whether it is what it was.

Contract: runs in a worker process, with the client that `stores` keeps; changes nothing. Raises
StoreError where nothing can be said. Not for what follows from it: `core/check/stored.py`.
"""

from collections.abc import Sequence

import xxhash

from kvfs.catalog import Stored
from kvfs.s3.errors import MetadataError, NoObjectError, ObjectChangedError, WrongBytesError
from kvfs.s3.facts import Facts
from kvfs.s3.store import Head, Page
from kvfs.s3.transfer import Transfers


def page(transfers: Transfers, prefix: str, after: str) -> Page:
    """See `Store.list`."""
    return transfers.store.list(prefix, after=after)


def heads(transfers: Transfers, keys: Sequence[str]) -> list[Head | None]:
    """What is at these keys; None for nothing."""
    found: list[Head | None] = []
    for key in keys:
        try:
            found.append(transfers.store.head(key))
        except NoObjectError:
            found.append(None)
    return found


def is_same(head: Head, stored: Stored, size: int, digest: bytes) -> bool:
    """Whether what is written beside an object says that it is this one, of `size` bytes."""
    try:
        facts = Facts.of_head(stored.key, head)
    except MetadataError:
        return False
    told = (facts.size, facts.digest, facts.stored_size, facts.stored_digest, facts.codec)
    return told == (size, digest, stored.size, stored.digest, stored.codec)


def verify(transfers: Transfers, stored: Stored, size: int, digest: bytes) -> str:
    """Read all of an object; why it is not what was stored, "" if it is."""
    store = transfers.store
    try:
        head = store.head(stored.key)
        if not is_same(head, stored, size, digest):
            return "what is written beside it in the bucket is not what it is"
        found = xxhash.xxh3_128()
        for data in store.get(stored.key, 0, stored.size, etag=stored.etag):
            found.update(data)
    except (NoObjectError, ObjectChangedError, WrongBytesError) as error:
        return str(error)
    if found.digest() != stored.digest:
        return "its bytes in the bucket do not have their digest"
    return ""
