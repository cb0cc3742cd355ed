"""Questions to the bucket by a mover: names, listings, and whether an object is still the same.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, changes
nothing, knows no catalog. One call has many questions about names, and threads ask the store at the
same time. A failure is the answer to its own question only. An object that kvfs did not make is
`strange`, never an error. `peek` compares the header with its digest: a StoreError says that the
object is another one, or damaged. Not for acting on an answer.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import xxhash

from kvfs.catalog import Stored
from kvfs.compression.container import expect_codec
from kvfs.errors import UnsupportedError
from kvfs.s3 import header
from kvfs.s3.errors import (
    MetadataError,
    NoObjectError,
    ObjectChangedError,
    OutageError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.facts import Facts
from kvfs.s3.store import Head, ListingPage, is_listed
from kvfs.s3.transfer import RANGE_TRIES, StoreTransfers

THREADS = 16  # requests at once: as many connections as the client keeps
RECORD_MAX = 4096 * 3  # bytes of the longest path, if each byte is escaped as three


class LookupQuestion(NamedTuple):
    """A question: does an object have the key `key`? If not, what is below it?

    - folder: list the keys that begin with this text, unless it is "".
    - limit: at most this many of those keys.
    - versions: list the folders that begin with this text, unless it is "".
    - sure: a listing must confirm that the object is missing, because kvfs acts on the answer.
    """

    key: str
    folder: str = ""
    limit: int = 1
    versions: str = ""
    sure: bool = False


class Seen(NamedTuple):
    """An object of kvfs."""

    etag: str
    facts: Facts

    def stored(self, key: str) -> Stored:
        """The `Stored` of this object, as the catalog keeps it."""
        facts = self.facts
        return Stored(key, self.etag, facts.stored_size, facts.stored_digest, facts.codec)


class LookupAnswer(NamedTuple):
    """The answer to a `LookupQuestion`. seen: the object; None if there is none of kvfs.

    strange: why the object at the key is not one of kvfs, "" otherwise. below, versions: what the
    listings of `folder` and of `versions` found.
    """

    seen: Seen | None = None
    strange: str = ""
    below: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


def look(
    transfers: StoreTransfers, asks: Sequence[LookupQuestion]
) -> list[LookupAnswer | StoreError]:
    """Answer each question. A StoreError is the answer to a question that failed."""
    listed = transfers.store.list
    with ThreadPoolExecutor(min(THREADS, 3 * len(asks)), thread_name_prefix="look") as threads:

        def pages(prefix: str, **options: int | str) -> Callable[[], ListingPage]:
            if not prefix:
                return lambda: _NONE
            return threads.submit(partial(listed, prefix, **options)).result  # type: ignore[arg-type]

        begun = [
            (
                threads.submit(_head, transfers, ask).result,
                pages(ask.folder, limit=ask.limit),
                pages(ask.versions, delimiter="/"),
            )
            for ask in asks
        ]
        return [_answer(*results) for results in begun]


def page(transfers: StoreTransfers, prefix: str, after: str, delimiter: str = "") -> ListingPage:
    """Return the next page of a listing. See `Store.list`."""
    return transfers.store.list(prefix, after=after, delimiter=delimiter)


def records(transfers: StoreTransfers, keys: Sequence[str]) -> list[bytes | StoreError]:
    """Return the contents of records: small objects. A StoreError stands for a failed one."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="look") as threads:
        return list(threads.map(partial(_record, transfers), keys))


_NONE = ListingPage([], [], "")


def _answer(
    head: Callable[[], LookupAnswer],
    below: Callable[[], ListingPage],
    versions: Callable[[], ListingPage],
) -> LookupAnswer | StoreError:
    """The answer to one question. It has the listings only if the object is missing."""
    try:
        found = head()
        if found.seen is not None:
            return found
        return found._replace(
            below=tuple(entry.key for entry in below().entries), versions=tuple(versions().folders)
        )
    except StoreError as error:
        return error


def _head(transfers: StoreTransfers, ask: LookupQuestion) -> LookupAnswer:
    found = _seen(transfers, ask.key)
    if found is None and ask.sure and is_listed(transfers.store, ask.key):
        found = _seen(transfers, ask.key)  # another node has made it meanwhile
        if found is None:
            raise OutageError(f"{transfers.store.name}/{ask.key}: is listed, but HEAD has 404")
    return found or LookupAnswer()


def _seen(transfers: StoreTransfers, key: str) -> LookupAnswer | None:
    try:
        head = transfers.store.head(key)
        facts = Facts.of_head(key, head)
        if facts.codec != "none":
            expect_codec(facts.codec)
    except NoObjectError:
        return None
    except (MetadataError, UnsupportedError) as error:
        return LookupAnswer(strange=f"{key}: {error}")
    return LookupAnswer(Seen(head.etag, facts))


def _record(transfers: StoreTransfers, key: str) -> bytes | StoreError:
    try:
        return transfers.read(key, RECORD_MAX)
    except StoreError as error:
        return error


def head(transfers: StoreTransfers, key: str) -> Head | None:
    """The `Head` of a key; None if there is no object."""
    try:
        return transfers.store.head(key)
    except NoObjectError:
        return None


def is_same(head: Head, stored: Stored, size: int, digest: bytes) -> bool:
    """Whether the metadata of an object fit `stored`, `size` and `digest`."""
    try:
        facts = Facts.of_head(stored.key, head)
    except MetadataError:
        return False
    told = (facts.size, facts.digest, facts.stored_size, facts.stored_digest, facts.codec)
    return told == (size, digest, stored.size, stored.digest, stored.codec)


def verify(transfers: StoreTransfers, stored: Stored, size: int, digest: bytes) -> str:
    """Read all of an object. Returns how it differs from `stored`; "" if it does not."""
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


def peek(transfers: StoreTransfers, stored: Stored, size: int, digest: bytes) -> bytes:
    """The verified header of an object; b"" if its metadata have no digest of the header.

    size, digest: of the object as its readers see it.
    """
    head, data = _peek(transfers, stored)
    where = f"{transfers.store.name}/{stored.key}"
    if not is_same(head, stored, size, digest):
        raise ObjectChangedError(f"{where}: what is written beside it is of another object")
    wanted = header.of_metadata(stored.key, head.metadata)
    if wanted and not header.proven(data, wanted):
        raise WrongBytesError(
            f"{where}: its first {len(data)} bytes have another xxh3-128 than was stored beside it"
        )
    return data if wanted else b""


def _peek(transfers: StoreTransfers, stored: Stored) -> tuple[Head, bytes]:
    for _ in range(RANGE_TRIES - 1):
        try:
            return transfers.store.peek(stored.key, header.SIZE, etag=stored.etag)
        except OutageError:  # perhaps the connection broke: try again
            continue
    return transfers.store.peek(stored.key, header.SIZE, etag=stored.etag)
