"""An object store as kvfs needs it: few verbs, each one request (deletes and listings: a page).

Contract: all implementations pass tests/s3/test_store.py. Calls block, so they belong in mover
processes, never in the daemon's loop; many threads may call one store. Keys are the whole keys of
the bucket, as text; ETags are without their quotes. Each failure is a class of `kvfs.s3.errors`;
the store itself retries where that is worth it. Not for whole files, which may take several
requests (`kvfs.s3.transfer`), nor for the meaning of keys and metadata (`keys`, `facts`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, Union

from kvfs.s3.errors import StoreError

Data = Union[bytes, memoryview]  # noqa: UP007 (read at run time, by Python 3.10 too)

LIST_LIMIT = 1000  # most keys in one answer, and in one delete
PART_MIN = 5 << 20  # bytes of a part that is not the last, as every S3 has it
PARTS_MAX = 10_000


class Entry(NamedTuple):
    """One object of a listing. `modified`: seconds since the epoch, by the store's clock."""

    key: str
    size: int
    etag: str
    modified: float


class ListingPage(NamedTuple):
    """`folders` are prefixes that end in the delimiter. `after` begins the next page; "": none."""

    entries: list[Entry]
    folders: list[str]
    after: str


class Head(NamedTuple):
    """An object without its bytes. `metadata`: names in lower case."""

    size: int
    etag: str
    modified: float
    metadata: dict[str, str]


class Part(NamedTuple):
    """One part of a multipart upload; numbers begin with 1."""

    number: int
    etag: str


class Upload(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    begun: float


def is_listed(store: "Store", key: str) -> bool:
    """Whether a listing has the key: a HEAD's 404 may also mean the bucket, or come from a proxy.

    Raises what `Store.list` raises, as it does for both.
    """
    return any(entry.key == key for entry in store.list(key, limit=1).entries)


def pages(store: "Store", prefix: str) -> Iterator[ListingPage]:
    """Yield the keys of a prefix, a page at a time, at least one page. Raises as `Store.list`."""
    after = ""
    while True:
        page = store.list(prefix, after=after)
        yield page
        if not (after := page.after):
            return


class Store(Protocol):
    """Every verb may raise ThrottledError, OutageError, RefusedError and NoBucketError."""

    @property
    def name(self) -> str:
        """The bucket, for messages."""

    def clock(self) -> float:
        """The store's time: seconds since the epoch, as in `Entry.modified`."""

    def put(self, key: str, data: Data, metadata: Mapping[str, str], *, once: bool) -> str:
        """Store an object, all or nothing; return its ETag. `data` is not kept.

        once: raise ObjectExistsError if the key exists, atomically, if the store honours that (see
        `kvfs.s3.probe`). Raises WrongBytesError if the bytes were damaged on their way,
        StoreFullError.
        """

    def copy(self, source: str, key: str, metadata: Mapping[str, str], *, etag: str) -> str:
        """Store a copy of another key's object, with metadata of its own; return its ETag.

        Raises NoObjectError; ObjectChangedError if the source has another ETag than the one given,
        where the store honours that (Ceph 16 does not). Raises RefusedError for more bytes than a
        store copies in one request, 5 GiB mostly.
        """

    def get(self, key: str, start: int, length: int, *, etag: str = "") -> Iterator[bytes]:
        """Yield `length` bytes from `start` in pieces; fewer only where the object ends.

        Raises NoObjectError; ObjectChangedError if the object has another ETag than the one given;
        WrongBytesError if the store sends more or fewer than it announced.
        """

    def peek(self, key: str, length: int, *, etag: str) -> tuple[Head, bytes]:
        """The `head` and the first `length` bytes, fewer if the object is shorter, by one request.

        Raises as `get`.
        """

    def head(self, key: str) -> Head:
        """The `Head` of an object. Raises NoObjectError."""

    def delete(self, key: str) -> None:
        """Delete an object. A missing object counts as deleted."""

    def delete_many(self, keys: Sequence[str]) -> dict[str, StoreError]:
        """Delete up to LIST_LIMIT objects; return the failures, by key."""

    def list(
        self, prefix: str, *, after: str = "", delimiter: str = "", limit: int = LIST_LIMIT
    ) -> ListingPage:
        """Return keys that begin with `prefix` and come after `after`, in the order of UTF-8."""

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; return its id."""

    def put_part(self, key: str, upload_id: str, number: int, data: Data) -> str:
        """Store a part, or replace it; return its ETag. Raises NoUploadError, as `put`."""

    def copy_part(
        self,
        source: str,
        key: str,
        upload_id: str,
        number: int,
        start: int,
        length: int,
        *,
        etag: str,
    ) -> str:
        """Make `length` bytes from `start` of another object a part; return the part's ETag.

        Raises NoObjectError; ObjectChangedError as `copy`; StoreError if the upload does not exist,
        or the source does not have these bytes.
        """

    def complete(self, key: str, upload_id: str, parts: Sequence[Part], *, once: bool) -> None:
        """Make an object of the parts, all or nothing. Some stores do not tell its ETag.

        Raises NoUploadError; WrongBytesError if the store has other parts; as `put`.
        """

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload. A missing upload counts as aborted."""

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the uploads that were begun below a prefix."""
