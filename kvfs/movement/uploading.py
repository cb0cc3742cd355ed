"""Uploads by a mover: it stores objects in the bucket, renames them there, and deletes keys.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. An object is uploaded, compressed or not, only if its bytes have the digest of its seal. To
give an object another name, or other metadata, the store copies it. The copy keeps its codec, and
no bytes of the object pass through this node. Raises StoreError, OSError, SourceChangedError. Not
for choosing uploads, nor for an object's metadata (`publishing`).
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from kvfs import failpoints
from kvfs.catalog import PackedCopy, Stored
from kvfs.movement import packing, publishing
from kvfs.movement.copying import LostError, expect_written
from kvfs.movement.files import expect_same, reading
from kvfs.movement.looking import THREADS
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.s3 import header
from kvfs.s3.chunks import LEAST, weigh
from kvfs.s3.errors import ObjectExistsError, SourceError, StoreError
from kvfs.s3.transfer import ATTEMPT, StoreTransfers, expect_source


def upload(
    transfers: StoreTransfers,
    source: str,
    touched_ns: int,
    about: About,
    target: Target,
    notes: str,
    scratch: str | None,
    copy: PackedCopy | None = None,
) -> Uploaded:
    """Store a backing file that was last changed at `touched_ns`.

    - notes: the directory for ids of uploads.
    - scratch: see `packing.packed`; None: upload it uncompressed.
    - copy: the file is this packed copy, to upload as it is. If a plain copy has replaced it, the
      plain one is uploaded.

    Raises ObjectExistsError if another object has the name, SourceError if the file has another
    digest than it should.
    """
    with ExitStack() as stack:
        fd = stack.enter_context(reading(source))
        failpoints.reach("movement.upload")
        if copy is not None and os.fstat(fd).st_size == about.size:
            copy = None
        size = about.size if copy is None else copy.size
        expect_same(fd, source, size, touched_ns)
        packed = result = chunks = None
        first = b""
        if copy is None and scratch is not None:
            packed, result = stack.enter_context(
                packing.packed(fd, about.size, scratch, about.element_size)
            )
        if copy is not None:
            sent, digest = fd, about.digest
            stored = Stored(
                target.key, "", copy.size, copy.digest, copy.codec, attributes=about.attributes
            )
        elif packed is None:
            digest = about.digest
            if about.size > LEAST or not digest:  # the request has the digests before the bytes
                digest, chunks = weigh(fd, about.size)
            if not about.digest:
                _expect_written(fd, source)
            first = header.weigh(fd, about.size)
            sent, stored = (
                fd,
                Stored(target.key, "", about.size, digest, attributes=about.attributes),
            )
        else:
            digest = packed.content
            if not about.digest:
                _expect_written(fd, source)
            sent = packed.fd
            stored = Stored(
                target.key,
                "",
                packed.size,
                packed.digest,
                packed.codec,
                attributes=about.attributes,
            )
        expect_source(target.key, digest, about.digest or digest)
        metadata = publishing.facts(about, stored, digest, chunks, first).metadata()
        publishing.publish_name(transfers, target.record)

        def send(*, once: bool) -> Stored:
            with publishing.noted(transfers, notes, target.key) as note:
                etag = transfers.upload(
                    *(target.key, sent, stored.size, metadata),
                    digest=stored.digest,
                    once=once,
                    begun=note,
                    token=target.token,
                )
            return stored._replace(etag=etag)

        try:
            done = send(once=target.once)
        except ObjectExistsError:
            if publishing.is_ours(transfers, target.key, target.ours):
                done = send(once=False)
            else:
                done = publishing.adopt_existing(transfers, target.key, digest, about)
        expect_same(fd, source, size, touched_ns)
        failpoints.reach("movement.uploaded")
        return Uploaded(done, digest, result)


def remove(
    transfers: StoreTransfers, keys: Sequence[str], attempts: Mapping[str, tuple[str, ...]]
) -> dict[str, StoreError]:
    """Delete objects. Returns the keys that are still there, with the reason.

    attempts: keys with tokens. Such a key is deleted only if the present object is one of these:
    see `is_ours`. Another node may still replace it between the question and the delete, some
    ms later: not every store has conditional deletes.
    """
    sure = [key for key in keys if key not in attempts]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="remove") as threads:
        ours = threads.map(partial(publishing.is_ours, transfers), attempts, attempts.values())
        sure += [key for key, is_ours in zip(attempts, ours, strict=True) if is_ours]
    return transfers.store.delete_many(sure)


def abort_interrupted(transfers: StoreTransfers, notes: str) -> int:
    """Abort the interrupted uploads. Returns their number."""
    return sum(publishing.abort_noted(transfers, path) for path in Path(notes).glob("*.json"))


def _expect_written(fd: int, source: str) -> None:
    """Check that a file without a digest has the bytes written to it. Raises SourceError."""
    try:
        expect_written(fd, source)
    except LostError as error:
        raise SourceError(f"the kernel could not write {source}: {error}") from error


# S3 copies 5 GiB in one request, but answers only at the end: that takes longer than the client
# waits.
WHOLE = 256 << 20  # bytes
PART = 64 << 20  # bytes


def copy(
    transfers: StoreTransfers, source: Stored, about: About, target: Target, notes: str
) -> Uploaded:
    """Give a stored object another name, or other metadata at the same key.

    notes: the directory for ids of uploads. Raises ObjectChangedError or NoObjectError if `source`
    is no longer there; ObjectExistsError if another object has the new name.
    """
    failpoints.reach("movement.upload")
    publishing.publish_name(transfers, target.record)
    # Some stores do not check the ETag of the source.
    source, chunks, first = publishing.as_it_is_now(transfers, source, about.digest)
    metadata = publishing.facts(about, source, about.digest, chunks, first).metadata()
    fresh = target.once and not publishing.is_ours(transfers, target.key, target.ours)
    try:
        if fresh:
            transfers.refuse_existing(target.key)
        if source.size <= WHOLE:
            made_by = {ATTEMPT: target.token} if target.token else {}
            etag = transfers.store.copy(
                source.key, target.key, metadata | made_by, etag=source.etag
            )
        else:
            with publishing.noted(transfers, notes, target.key) as note:
                etag = transfers.copy_in_parts(
                    *(source.key, target.key, source.size, metadata),
                    etag=source.etag,
                    part=PART,
                    once=fresh,
                    begun=note,
                    token=target.token,
                )
        done = source._replace(key=target.key, etag=etag, attributes=about.attributes)
    except ObjectExistsError:
        done = publishing.adopt_existing(transfers, target.key, about.digest, about)
    failpoints.reach("movement.uploaded")
    return Uploaded(done, about.digest)
