"""What a mover looks up in the bucket: whether a name is there, and what is listed below one.

Contract: runs in a worker process, with the client that `stores` keeps; decides nothing, knows no
catalog. Many questions come in one call and are asked at the same time, on threads. What fails is
the answer to its own question only. What is no object of kvfs is `strange`, never an error.
Not for bytes of objects.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from kvfs.compression.container import expect_codec
from kvfs.errors import UnsupportedError
from kvfs.s3.errors import MetadataError, NoObjectError, OutageError, StoreError
from kvfs.s3.facts import Facts
from kvfs.s3.store import LIST_LIMIT, Page, is_listed
from kvfs.s3.transfer import Transfers

THREADS = 16  # requests at once: as many connections as the client keeps
RECORD_MAX = 4096 * 3  # bytes of the longest path, each of them escaped


class Ask(NamedTuple):
    """Whether there is an object with this key; and, unless it is "", what begins with `folder`.

    limit: so many keys of that at most. versions: which folders begin with that, unless it is "".
    sure: a listing is to say as well that it is not there, since something goes by that.
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


class Answer(NamedTuple):
    """`strange` says why what has the key is no object of kvfs, "" if it is one or nothing is."""

    seen: Seen | None = None
    strange: str = ""
    below: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


def look(transfers: Transfers, asks: Sequence[Ask]) -> list[Answer | StoreError]:
    """Answer each question."""
    listed = transfers.store.list
    with ThreadPoolExecutor(min(THREADS, 3 * len(asks)), thread_name_prefix="look") as threads:

        def pages(prefix: str, **options: int | str) -> Callable[[], Page]:
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


def page(transfers: Transfers, prefix: str, after: str, delimiter: str) -> Page:
    """Return what is listed next. See `Store.list`."""
    return transfers.store.list(prefix, after=after, delimiter=delimiter, limit=LIST_LIMIT)


def records(transfers: Transfers, keys: Sequence[str]) -> list[bytes | StoreError]:
    """Return the contents of small objects."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="look") as threads:
        return list(threads.map(partial(_record, transfers), keys))


_NONE = Page([], [], "")


def _answer(
    head: Callable[[], Answer], below: Callable[[], Page], versions: Callable[[], Page]
) -> Answer | StoreError:
    """An object is enough of an answer; that there is none needs all of them."""
    try:
        found = head()
        if found.seen is not None:
            return found
        return found._replace(
            below=tuple(entry.key for entry in below().entries), versions=tuple(versions().folders)
        )
    except StoreError as error:
        return error


def _head(transfers: Transfers, ask: Ask) -> Answer:
    found = _seen(transfers, ask.key)
    if found is None and ask.sure and is_listed(transfers.store, ask.key):
        found = _seen(transfers, ask.key)  # it came in this moment
        if found is None:
            raise OutageError(f"{transfers.store.name}/{ask.key}: is listed, but HEAD has 404")
    return found or Answer()


def _seen(transfers: Transfers, key: str) -> Answer | None:
    try:
        head = transfers.store.head(key)
        facts = Facts.of_head(key, head)
        if facts.codec != "none":
            expect_codec(facts.codec)
    except NoObjectError:
        return None
    except (MetadataError, UnsupportedError) as error:
        return Answer(strange=f"{key}: {error}")
    return Answer(Seen(head.etag, facts))


def _record(transfers: Transfers, key: str) -> bytes | StoreError:
    try:
        return transfers.read(key, RECORD_MAX)
    except StoreError as error:
        return error
