"""The names and metadata of objects in a bucket, for every job that writes an object.

Contract: runs in a worker process; `uploading` uses it. Only one node publishes a name. If another
node's object has the name and the same content, in any codec, kvfs uses that object. The id of an
upload in parts is on the disk before its first part, so that `abort_interrupted` can abort
interrupted uploads. Raises StoreError, OSError. Not for bytes.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from kvfs import own_files
from kvfs.catalog import Stored
from kvfs.compression.container import expect_codec
from kvfs.errors import ConfigError, UnsupportedError
from kvfs.movement.packing import PackingResult
from kvfs.s3 import header
from kvfs.s3.chunks import Chunks
from kvfs.s3.errors import (
    MetadataError,
    NoObjectError,
    ObjectChangedError,
    ObjectExistsError,
    OutageError,
)
from kvfs.s3.facts import DIGEST, OF_DIGEST, OF_ETAG, Facts
from kvfs.s3.store import is_listed
from kvfs.s3.transfer import ATTEMPT, StoreTransfers


class About(NamedTuple):
    """The catalog's facts about an object to upload. `digest`: b"" if it was not computed.

    attributes: mode, owner and time, in the catalog's form of one string. element_size: bytes of
    one number of the tensor, None if unknown.
    """

    size: int
    digest: bytes
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    key: int
    parent_key: int
    model: str
    attributes: str
    element_size: int | None = None


class Target(NamedTuple):
    """Where to upload an object. `record`: key and bytes of the record that has the name.

    The record is None if the key needs none. once: the upload must fail if another object
    has the key. token: the id of this attempt. ours: the tokens of earlier attempts of this node,
    whose outcome is unknown.
    """

    key: str
    record: tuple[str, bytes] | None
    once: bool
    token: str = ""
    ours: tuple[str, ...] = ()


class Uploaded(NamedTuple):
    """The result of an upload. `digest` is of the object as its readers see it.

    packing: cost and outcome of compressing it; None if it was not to be compressed.
    """

    stored: Stored
    digest: bytes
    packing: PackingResult | None = None


def facts(
    about: About, stored: Stored, digest: bytes, chunks: Chunks | None, first: bytes
) -> Facts:
    """All metadata of an object. `digest` is of the object as its readers see it.

    first: the digest of its header.
    """
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
        codec=stored.codec,
        stored_size=stored.size,
        stored_digest=stored.digest,
        chunks=chunks,
        header=first,
    )


def is_ours(transfers: StoreTransfers, key: str, tokens: Sequence[str]) -> bool:
    """Whether one of these attempts has made the present object.

    A token may also have its digest or its ETag.
    """
    if not tokens:
        return False
    try:
        found = transfers.store.head(key)
    except NoObjectError:
        return False
    told = found.metadata
    of_it = (
        *(told.get(ATTEMPT, ""), f"{OF_ETAG}{found.etag}"),
        f"{OF_DIGEST}{told.get(DIGEST, '')}",
    )
    return any(one in tokens for one in of_it)


def publish_name(transfers: StoreTransfers, record: tuple[str, bytes] | None) -> None:
    """Write the record of a name. All nodes write the same bytes: its key is their hash."""
    if record is not None:
        key, content = record
        transfers.store.put(key, content, {}, once=False)


def adopt_existing(transfers: StoreTransfers, key: str, digest: bytes, about: About) -> Stored:
    """The `Stored` of the object that has the key already, if it has the same content.

    Raises ObjectExistsError if it has another content, or this version of kvfs cannot read it.
    """
    head, where = transfers.store.head(key), f"{transfers.store.name}/{key}"
    try:
        found = Facts.of_head(key, head)
        if found.codec != "none":
            expect_codec(found.codec)
    except MetadataError as error:
        raise ObjectExistsError(f"{where} is no object of kvfs") from error
    except UnsupportedError as error:
        raise ObjectExistsError(f"{where} cannot be read by this version: {error}") from error
    if (found.size, found.digest) != (about.size, digest):
        raise ObjectExistsError(
            f"{where} is another object: {found.size} bytes with xxh3-128 {found.digest.hex()}, "
            f"expected {about.size} with {digest.hex()}"
        )
    # Mode and time beside the object are the other node's, and stay.
    return Stored(
        key,
        head.etag,
        found.stored_size,
        found.stored_digest,
        found.codec,
        attributes=about.attributes,
    )


def as_it_is_now(
    transfers: StoreTransfers, stored: Stored, digest: bytes
) -> tuple[Stored, Chunks | None, bytes]:
    """Ask for the present ETag of a stored object, and the digests of its chunks and header.

    The ETag changes when a node changes the mode. This node may have done so, too, if an answer was
    lost. The digests are None and b"" if the object has none. Raises ObjectChangedError if the key
    has another object, NoObjectError, MetadataError.
    """
    try:
        head = transfers.store.head(stored.key)
    except NoObjectError as error:
        if is_listed(transfers.store, stored.key):
            raise OutageError(f"{error}, but it is listed") from error
        raise
    if head.etag == stored.etag:
        chunks = Chunks.of_metadata(stored.key, head.metadata, stored.size)
        return stored, chunks, header.of_metadata(stored.key, head.metadata)
    try:
        found = Facts.of_head(stored.key, head)
    except MetadataError:
        found = None
    if found is None or (found.digest, found.stored_digest, found.codec) != (
        digest,
        stored.digest,
        stored.codec,
    ):
        raise ObjectChangedError(f"{transfers.store.name}/{stored.key}: its ETag has changed")
    return stored._replace(etag=head.etag), found.chunks, found.header


@contextmanager
def noted(transfers: StoreTransfers, notes: str, key: str) -> Iterator[Callable[[str], None]]:
    """Yields a function, to call with an upload's id before its first part.

    The function writes the id to the disk. A normal end of the block removes the file.
    """
    path = _note_of(Path(notes), key)
    if path.exists():  # abort the last attempt before the new id replaces its id
        abort_noted(transfers, path)
    written: list[Path] = []

    def note(upload_id: str) -> None:
        own_files.write(path, json.dumps({"key": key, "upload_id": upload_id}))
        written.append(path)

    yield note
    for one in written:  # not after a failure: the abort may have failed as well
        one.unlink(missing_ok=True)


def _note_of(notes: Path, key: str) -> Path:
    return notes / f"{xxh3_64_hexdigest(key.encode())}.json"


def abort_noted(transfers: StoreTransfers, path: Path) -> bool:
    """Abort the upload of a note, and remove the note. Returns whether it named an upload."""
    found = _noted_in(path)
    if found is not None:
        transfers.store.abort(*found)
        path.unlink(missing_ok=True)
    return found is not None


def ids_noted(notes: str) -> frozenset[str]:
    """The ids of the uploads that are under way, or were interrupted."""
    found = map(_noted_in, Path(notes).glob("*.json"))
    return frozenset(one[1] for one in found if one is not None)


def _noted_in(path: Path) -> tuple[str, str] | None:
    """The key and id in a note. None if the file is gone, or `noted` did not write it."""
    try:
        noted = own_files.read_table(path, "a key and the id of an upload", "remove it") or {}
    except ConfigError:
        return None
    key, upload_id = noted.get("key"), noted.get("upload_id")
    if not isinstance(key, str) or not isinstance(upload_id, str):
        return None
    # A note at the path of another key would make kvfs abort the wrong upload.
    return (key, upload_id) if path == _note_of(path.parent, key) else None
