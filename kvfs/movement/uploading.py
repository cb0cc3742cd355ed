"""What a mover does for the bucket: an object goes up, is copied there, keys are deleted.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. A name is published once: if another object has it that is the same, it is taken for ours.
The id of an upload in parts is on the disk before its first part, so that `sweep` can abort what
was cut short. Raises StoreError, OSError, SourceChangedError. Not for choosing what goes up.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from kvfs import failpoints
from kvfs.catalog import Stored
from kvfs.movement.copying import SourceChangedError
from kvfs.s3.chunks import LEAST, Chunks, weigh
from kvfs.s3.errors import (
    MetadataError,
    NoObjectError,
    ObjectChangedError,
    ObjectExistsError,
    SourceError,
    StoreError,
)
from kvfs.s3.facts import Facts
from kvfs.s3.transfer import ATTEMPT, Transfers

log = logging.getLogger(__name__)


class About(NamedTuple):
    """What an object is, beside its bytes. `digest`: b"" if nobody computed it."""

    size: int
    digest: bytes
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    key: int
    parent_key: int
    model: str


class Target(NamedTuple):
    """Where it goes. `record`: key and bytes of what says its name, if the key does not.

    once: nobody is known to have the name. token: what this attempt is called, `ours` are those of
    earlier ones, of which nobody knows how they ended.
    """

    key: str
    record: tuple[str, bytes] | None
    once: bool
    token: str = ""
    ours: tuple[str, ...] = ()


class Uploaded(NamedTuple):
    """What there is now. `digest` is of the object as its readers see it."""

    stored: Stored
    digest: bytes


def upload(
    transfers: Transfers, source: str, touched_ns: int, about: About, target: Target, notes: str
) -> Uploaded:
    """Store a backing file that was last changed at `touched_ns`.

    notes: the directory for ids of uploads. Raises ObjectExistsError if another object has the
    name, SourceError if the file has another digest than it should.
    """
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if failpoints.active:
            failpoints.reach("movement.upload")
        _expect(fd, source, about.size, touched_ns)
        digest, chunks = about.digest, None
        if not digest or about.size > LEAST:  # what goes beside the bytes goes before them
            digest, chunks = weigh(fd, about.size)
        if digest != (about.digest or digest):
            raise SourceError(
                f"{source} has xxh3-128 {digest.hex()}, expected {about.digest.hex()}"
            )
        facts = _facts(about, digest, about.size, digest, "none", chunks)
        if target.record is not None:
            _publish_name(transfers, target.record)

        def send(*, once: bool) -> str:
            with _noted(notes, target.key) as note:
                return transfers.upload(
                    *(target.key, fd, about.size, facts.metadata()),
                    digest=digest,
                    once=once,
                    begun=note,
                    token=target.token,
                )

        try:
            etag = send(once=target.once)
        except ObjectExistsError:
            if _is_ours(transfers, target.key, target.ours):
                etag = send(once=False)
            else:
                etag = _same(transfers, target.key, digest, about.size)
        _expect(fd, source, about.size, touched_ns)
        if failpoints.active:
            failpoints.reach("movement.uploaded")
        return Uploaded(Stored(target.key, etag, about.size, digest), digest)
    finally:
        os.close(fd)


def copy(transfers: Transfers, source: Stored, about: About, target: Target) -> Uploaded:
    """Give what is stored another name, in the bucket. Raises ObjectChangedError."""
    if failpoints.active:
        failpoints.reach("movement.upload")
    if target.record is not None:
        _publish_name(transfers, target.record)
    head = transfers.store.head(source.key)
    if head.etag != source.etag:  # not every store looks by itself
        raise ObjectChangedError(f"{transfers.store.name}/{source.key}: its ETag has changed")
    chunks = Chunks.of_metadata(source.key, head.metadata, source.size)
    facts = _facts(about, about.digest, source.size, source.digest, source.codec, chunks)
    try:
        if target.once and not _is_ours(transfers, target.key, target.ours):
            _refuse_existing(transfers, target.key)
        metadata = facts.metadata() | ({ATTEMPT: target.token} if target.token else {})
        etag = transfers.store.copy(source.key, target.key, metadata, etag=source.etag)
    except ObjectExistsError:
        etag = _same(transfers, target.key, about.digest, about.size)
    if failpoints.active:
        failpoints.reach("movement.uploaded")
    return Uploaded(source._replace(key=target.key, etag=etag), about.digest)


def remove(
    transfers: Transfers, keys: Sequence[str], attempts: Mapping[str, tuple[str, ...]]
) -> dict[str, StoreError]:
    """Delete objects; which are still there, and why.

    attempts: keys that are only deleted if one of these has made what is there.
    """
    sure = [key for key in keys if key not in attempts]
    sure += [key for key, tokens in attempts.items() if _is_ours(transfers, key, tokens)]
    return transfers.store.delete_many(sure)


def sweep(transfers: Transfers, notes: str) -> int:
    """Abort the uploads that were cut short; how many there were."""
    found = 0
    for path in Path(notes).glob("*.json"):
        try:
            told = json.loads(path.read_text())
            key, upload_id = str(told["key"]), str(told["upload_id"])
        except (ValueError, KeyError, TypeError):  # it was cut short itself, before the first part
            path.unlink(missing_ok=True)
            continue
        transfers.store.abort(key, upload_id)
        path.unlink(missing_ok=True)
        found += 1
    return found


def _facts(
    about: About, digest: bytes, size: int, stored: bytes, codec: str, chunks: Chunks | None
) -> Facts:
    return Facts(
        size=about.size,
        digest=digest,
        mtime_ns=about.mtime_ns,
        mode=about.mode & 0o7777,
        uid=about.uid,
        gid=about.gid,
        key=about.key,
        parent_key=about.parent_key,
        model=about.model,
        codec=codec,
        stored_size=size,
        stored_digest=stored,
        chunks=chunks,
    )


def _expect(fd: int, source: str, size: int, touched_ns: int) -> None:
    found = os.fstat(fd)
    if (found.st_size, found.st_mtime_ns) != (size, touched_ns):
        raise SourceChangedError(
            f"{source} has {found.st_size} bytes of {found.st_mtime_ns} ns, expected {size} of "
            f"{touched_ns}"
        )


def _is_ours(transfers: Transfers, key: str, tokens: Sequence[str]) -> bool:
    """Whether one of these attempts has made what is there."""
    try:
        return bool(tokens) and transfers.store.head(key).metadata.get(ATTEMPT, "") in tokens
    except NoObjectError:
        return False


def _publish_name(transfers: Transfers, record: tuple[str, bytes]) -> None:
    """Whoever wrote it before has written the same: its key is the hash of its content."""
    key, content = record
    transfers.store.put(key, content, {}, once=False)


def _refuse_existing(transfers: Transfers, key: str) -> None:
    try:
        transfers.store.head(key)
    except NoObjectError:
        return
    raise ObjectExistsError(f"{transfers.store.name}/{key} is there already")


def _same(transfers: Transfers, key: str, digest: bytes, size: int) -> str:
    """The ETag of what another node has stored there, if it is this very object."""
    head = transfers.store.head(key)
    try:
        facts = Facts.of_head(key, head)
    except MetadataError as error:
        raise ObjectExistsError(f"{transfers.store.name}/{key} is no object of kvfs") from error
    if (facts.size, facts.digest, facts.codec) != (size, digest, "none"):
        raise ObjectExistsError(
            f"{transfers.store.name}/{key} is another object: {facts.size} bytes with xxh3-128 "
            f"{facts.digest.hex()}, expected {size} with {digest.hex()}"
        )
    return head.etag


@contextmanager
def _noted(notes: str, key: str) -> Iterator[Callable[[str], None]]:
    """What to call with an upload's id, before its first part. It is forgotten when all is done."""
    path = Path(notes) / f"{xxh3_64_hexdigest(key.encode())}.json"
    noted: list[Path] = []

    def note(upload_id: str) -> None:
        fresh = path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(json.dumps({"key": key, "upload_id": upload_id}))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        noted.append(path)

    yield note
    for one in noted:  # not after a failure: the abort may have failed as well
        one.unlink(missing_ok=True)
