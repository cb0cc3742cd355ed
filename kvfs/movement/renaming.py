"""What a mover does for the bucket: what is there gets another name, or says something else of it.

Contract: runs in a worker process, with the client that `stores` keeps. No bytes come here: the
store copies, in one request, or in parts what is larger than WHOLE. What is stored stays as it is,
with its codec. To copy an object onto its own key is how its mode, owner and time change there.
Raises StoreError, OSError of the notes. Not for what is only here (`uploading`).
"""

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement import publishing
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.s3.errors import ObjectExistsError
from kvfs.s3.transfer import ATTEMPT, Transfers

# S3 copies 5 GiB in one request, but answers only then: that takes longer than an answer may.
WHOLE = 256 << 20  # bytes
PART = 64 << 20  # bytes


def copy(
    transfers: Transfers, source: Stored, about: About, target: Target, notes: str
) -> Uploaded:
    """Give what is stored another name, or other metadata under the name that it has.

    notes: the directory for ids of uploads. Raises ObjectChangedError, NoObjectError if it is not
    what is there; ObjectExistsError if another object has the new name.
    """
    if failpoints.active:
        failpoints.reach("movement.upload")
    publishing.publish_name(transfers, target.record)
    # Not every store looks by itself.
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
        done = source._replace(key=target.key, etag=etag, told=about.told)
    except ObjectExistsError:
        done = publishing.same(transfers, target.key, about.digest, about)
    if failpoints.active:
        failpoints.reach("movement.uploaded")
    return Uploaded(done, about.digest)
