"""Whole files to and from a store, with several requests at once.

Contract: an object appears complete or not at all, and only if the sent bytes have the given
digest. A downloaded file has the digest too. An upload in parts tells its id before the first part,
so that another process can abort it after a crash. The bytes on their way take no more memory than
`parallel` parts, or one object that goes up in a single request. Calls block, and one
`StoreTransfers` is for one thread at a time. Not for choosing objects to move, nor for the meaning
of metadata.
"""

import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from kvfs.s3.chunks import pieces
from kvfs.s3.errors import (
    NoObjectError,
    NoUploadError,
    ObjectChangedError,
    ObjectExistsError,
    OutageError,
    SourceError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.store import PARTS_MAX, Data, Part, Store

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

MIB = 1 << 20
ATTEMPT = "kvfs-put"  # metadata: the attempt that made the object
RANGE_TRIES = 3  # tries of one range, if connections break within it


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a store. Sizes in bytes.

    - single: the largest object that goes up in one request.
    - part: the size of parts of larger objects, and of downloads.
    - parallel: requests for one object. All movers together should have about 8 requests under way,
      if the server is near.
    - once_put, once_complete: whether the store itself refuses to publish a name twice, by put and
      by complete. If it does not, kvfs looks first, and another node may write between.
    """

    single: int = 64 * MIB
    part: int = 8 * MIB
    parallel: int = 4
    once_put: bool = True
    once_complete: bool = True


class StoreTransfers:
    """Transfers to and from one store. Close it when done: it has threads."""

    def __init__(self, store: Store, terms: Terms) -> None:
        self.store = store
        self.terms = terms
        # Buffers are used again: new memory costs a put as much as its SHA-256 does.
        self._free: list[bytearray] = []
        self._threads = ThreadPoolExecutor(terms.parallel, thread_name_prefix="s3")

    def close(self) -> None:
        """Wait for running requests, begin no more."""
        self._threads.shutdown(cancel_futures=True)

    def put(
        self, key: str, data: Data, metadata: Mapping[str, str], *, once: bool, token: str = ""
    ) -> str:
        """Store bytes in one request; return the ETag. See `Store.put`.

        token: the name of this attempt in the object's metadata; "": none.
        """
        if once and not self.terms.once_put:
            self.refuse_existing(key)
        token = token or uuid.uuid4().hex
        try:
            return self.store.put(
                key, data, {**metadata, ATTEMPT: token}, once=once and self.terms.once_put
            )
        except ObjectExistsError:
            if etag := self._made(key, token):
                return etag
            raise

    def read(self, key: str, limit: int) -> bytes:
        """Return the bytes of a small object. Raises WrongBytesError beyond `limit` bytes."""
        head = self.store.head(key)
        if head.size > limit:
            raise WrongBytesError(
                f"{self.store.name}/{key}: {head.size} bytes, at most {limit} are expected"
            )
        return b"".join(self.store.get(key, 0, head.size, etag=head.etag))

    def upload(
        self,
        key: str,
        fd: int,
        size: int,
        metadata: Mapping[str, str],
        *,
        digest: bytes,
        once: bool,
        begun: Callable[[str], None],
        token: str = "",
    ) -> str:
        """Store the first `size` bytes of an open file; return the object's ETag.

        digest: their xxh3-128. token: as for `put`. begun: called with the id of a multipart upload
        before its first part; it must have persisted the id when it returns. Raises SourceError if
        the file is shorter or has another digest, OSError of reading it, and the errors of
        `Store.put`. After an error there is no new object, or a whole one: the store may fail after
        it has carried out the last request, and then be unreachable.
        """
        if size <= self.terms.single:
            buffer = self._buffer(size)
            data = memoryview(buffer)[:size]
            _read(fd, 0, data)
            expect_source(key, xxhash.xxh3_128_digest(data), digest)
            etag = self.put(key, data, metadata, once=once, token=token)
            self._free.append(buffer)
            return etag

        def send(upload_id: str) -> list[Part]:
            begun(upload_id)
            return self._send_parts(key, upload_id, fd, size, digest)

        return self._in_parts(key, size, metadata, send, once=once, token=token)

    def _in_parts(
        self,
        key: str,
        size: int,
        metadata: Mapping[str, str],
        send: Callable[[str], list[Part]],
        *,
        once: bool,
        token: str,
    ) -> str:
        """Make an object of the parts that `send` sends; return the ETag. See `upload`."""
        token = token or uuid.uuid4().hex
        upload_id = self.store.begin(key, {**metadata, ATTEMPT: token})
        try:
            parts = send(upload_id)
            if once and not self.terms.once_complete:
                self.refuse_existing(key)
            self.store.complete(key, upload_id, parts, once=once and self.terms.once_complete)
        except (ObjectExistsError, NoUploadError, OutageError):
            if etag := self._made(key, token):
                return etag
            self._abort(key, upload_id)
            raise
        except BaseException:
            self._abort(key, upload_id)
            raise
        made = self.store.head(key)
        if made.metadata.get(ATTEMPT) != token:
            raise ObjectExistsError(f"{self.store.name}/{key}: another object has the name")
        if made.size != size:
            raise WrongBytesError(
                f"{self.store.name}/{key}: has {made.size} bytes, expected {size}"
            )
        return made.etag

    def download(self, key: str, fd: int, size: int, *, etag: str, digest: bytes) -> None:
        """Write an object of `size` bytes into an open file, from its beginning.

        Raises WrongBytesError if the bytes do not have the xxh3-128 `digest`, OSError of writing
        them, and the errors of `Store.get`. After an error the file has the bytes that came so far.
        """
        part = self.terms.part
        ranges = [(start, min(part, size - start)) for start in range(0, size, part)]
        found = xxhash.xxh3_128()

        def fetch(start: int, length: int) -> int:
            self._fetch(key, fd, start, length, etag)
            return length

        # Hash in order, while later ranges are on their way: the newest bytes are in the cache.
        position = 0
        with closing(self._in_turn(fetch, ranges)) as lengths:
            for length in lengths:
                for data in pieces(fd, position, position + length):
                    found.update(data)
                position += length
        self.expect_bytes(key, found.digest(), digest)

    def expect_bytes(self, key: str, found: bytes, digest: bytes) -> None:
        """Raises WrongBytesError if the received bytes have another xxh3-128."""
        if found != digest:
            raise WrongBytesError(
                f"{self.store.name}/{key}: the bytes have xxh3-128 {found.hex()}, expected "
                f"{digest.hex()}"
            )

    def copy_in_parts(
        self,
        source: str,
        key: str,
        size: int,
        metadata: Mapping[str, str],
        *,
        etag: str,
        part: int,
        once: bool,
        begun: Callable[[str], None],
        token: str = "",
    ) -> str:
        """Let the store copy an object of `size` bytes in parts of `part` bytes; return the ETag.

        etag: of the source. token, begun: as for `upload`. Raises ObjectChangedError,
        NoObjectError, ObjectExistsError and the errors of `Store.complete`.
        """
        part = max(part, -(-size // PARTS_MAX))
        ranges = [(start, min(part, size - start)) for start in range(0, size, part)]

        def send(upload_id: str) -> list[Part]:
            def copy(number: int, wanted: tuple[int, int]) -> Part:
                made = self.store.copy_part(*(source, key, upload_id, number, *wanted), etag=etag)
                return Part(number, made)

            begun(upload_id)
            parts = list(self._in_turn(copy, enumerate(ranges, 1)))
            if self.store.head(source).etag != etag:  # some stores do not check this
                raise ObjectChangedError(f"{self.store.name}/{source}: its ETag has changed")
            return parts

        return self._in_parts(key, size, metadata, send, once=once, token=token)

    def fetch(self, key: str, fd: int, start: int, length: int, etag: str) -> Future[None]:
        """Begin to write one range of the object into the same place of an open file.

        The future raises the errors of `Store.get`, OSError of writing, WrongBytesError.
        """
        return self._threads.submit(self._fetch, key, fd, start, length, etag)

    def _buffer(self, size: int) -> bytearray:
        buffer = self._free.pop() if self._free else bytearray()
        return buffer if len(buffer) >= size else bytearray(size)

    def _send_parts(
        self, key: str, upload_id: str, fd: int, size: int, digest: bytes
    ) -> list[Part]:
        """Send all parts, and compare the digest of the bytes that were read.

        The store checks each part when it arrives, and the ETags of all when they become an object.
        """
        part = max(self.terms.part, -(-size // PARTS_MAX // MIB) * MIB)
        found = xxhash.xxh3_128()

        def read() -> Iterator[tuple[int, tuple[bytearray, int]]]:
            for number, start in enumerate(range(0, size, part), 1):
                buffer, length = self._buffer(part), min(part, size - start)
                data = memoryview(buffer)[:length]
                _read(fd, start, data)
                found.update(data)
                yield number, (buffer, length)

        def send(number: int, full: tuple[bytearray, int]) -> Part:
            buffer, length = full
            data = memoryview(buffer)[:length]
            etag = self.store.put_part(key, upload_id, number, data)
            self._free.append(buffer)
            return Part(number, etag)

        sent = list(self._in_turn(send, read()))
        expect_source(key, found.digest(), digest)
        return sent

    def _fetch(self, key: str, fd: int, start: int, length: int, etag: str) -> None:
        """Fetch one range. Bytes that came before a connection broke are not fetched again."""
        position, end = start, start + length
        for tries in range(1, RANGE_TRIES + 1):
            try:
                for data in self.store.get(key, position, end - position, etag=etag):
                    view = memoryview(data)
                    while view:
                        written = os.pwrite(fd, view, position)
                        view = view[written:]
                        position += written
                break
            except OutageError:
                if tries == RANGE_TRIES:
                    raise
        if position != end:
            raise WrongBytesError(f"{self.store.name}/{key}: ends at {position}, expected {end}")

    def _in_turn(
        self, do: Callable[[int, T], R], items: Iterable[tuple[int, T]]
    ) -> Generator[R, None, None]:
        """The result of `do` for each item, in order. At the end nothing is running.

        This thread itself handles a list of one item, because it would only wait.
        """
        if isinstance(items, list) and len(items) == 1:
            yield do(*items[0])
            return
        running: deque[Future[R]] = deque()
        try:
            for item in items:
                running.append(self._threads.submit(do, *item))
                if len(running) == self.terms.parallel:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
            wait(running)

    def refuse_existing(self, key: str) -> None:
        """Raises ObjectExistsError if the key exists."""
        try:
            self.store.head(key)
        except NoObjectError:
            return
        raise ObjectExistsError(f"{self.store.name}/{key} exists already")

    def _made(self, key: str, token: str) -> str:
        """The ETag of the present object if this very attempt has made it, else "".

        A store may carry out a request whose answer is lost; it refuses the request when it comes
        again.
        """
        try:
            found = self.store.head(key)
        except StoreError as error:
            log.debug("%s/%s: not known whether it was stored: %s", self.store.name, key, error)
            return ""
        return found.etag if found.metadata.get(ATTEMPT) == token else ""

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self.store.abort(key, upload_id)
        except StoreError as error:
            # Its id was told before: the process that keeps such ids aborts it later.
            log.warning("the upload %s was not aborted: %s", upload_id, error)


def _read(fd: int, start: int, into: memoryview) -> None:
    """Fill a buffer. Raises SourceError if the file ends earlier."""
    got = 0
    while got < len(into):
        more = os.preadv(fd, [into[got:]], start + got)
        if not more:
            raise SourceError(f"the file ends at {start + got}, expected {start + len(into)}")
        got += more


def expect_source(key: str, found: bytes, digest: bytes) -> None:
    """Raises SourceError if the uploaded file has another xxh3-128."""
    if found != digest:
        raise SourceError(
            f"the file that was to be stored as {key} has xxh3-128 {found.hex()}, expected "
            f"{digest.hex()}"
        )
