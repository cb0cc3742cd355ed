"""Download an object chunk by chunk, in the wanted order, and verify each chunk.

Contract: `download` writes into an open file. It compares a chunk's bytes in the file with the
chunk's digest, then reports the chunk as there, and writes to those bytes no more. The next chunk
is the one that a reader waits for, then those behind it, because files are read forward. `download`
returns when all chunks are there and the whole has its digest. Calls block. Not for objects whose
chunks have no digests: `StoreTransfers.download`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from kvfs.s3.chunks import Chunks, Proof
from kvfs.s3.errors import ObjectChangedError, WrongBytesError
from kvfs.s3.transfer import StoreTransfers

log = logging.getLogger(__name__)

SHORTEST = 1 << 20  # bytes of a request for a chunk that a reader waits for
TRIES = 2  # of a chunk whose bytes are wrong


@dataclass
class _Chunk:
    """A chunk that is not there yet. `ranges`: (start, length) to request; `running`: requested."""

    ranges: deque[tuple[int, int]]
    begun: bool = False
    running: int = 0
    tries: int = 0


class _Download:
    def __init__(
        self, transfers: StoreTransfers, key: str, fd: int, size: int, chunks: Chunks
    ) -> None:
        self.transfers = transfers
        self.name = f"{transfers.store.name}/{key}"
        self.fd = fd
        self.size = size
        self.chunks = chunks
        self.left = {number: _Chunk(self.ranges(number)) for number in range(len(chunks.digests))}
        self.next = 0  # the chunk that a reader waits for, at first the one that is read first
        self.proof = Proof(fd, size, chunks, f"{self.name}: the file that it comes to")

    def ranges(self, number: int, part: int = 0) -> deque[tuple[int, int]]:
        """The ranges of a chunk's requests, of `part` bytes each, or of the usual size."""
        start, part = number * self.chunks.size, part or self.transfers.terms.part
        end = min(start + self.chunks.size, self.size)
        return deque((at, min(part, end - at)) for at in range(start, end, part))

    def want(self, numbers: Iterable[int]) -> None:
        """Request the last of these chunks next."""
        for number in numbers:
            if number in self.left:
                self.next = number

    def take(self) -> tuple[int, tuple[int, int]] | None:
        """The next request: (chunk, range). None if all ranges are requested."""
        count, terms = len(self.chunks.digests), self.transfers.terms
        for step in range(count):
            number = (self.next + step) % count
            chunk = self.left.get(number)
            if chunk is not None and chunk.ranges:
                if not step and not chunk.begun:  # a reader waits: use all connections for it
                    chunk.ranges = self.ranges(number, max(SHORTEST, terms.part // terms.parallel))
                chunk.begun = True
                chunk.running += 1
                return number, chunk.ranges.popleft()
        return None

    def again(self, number: int, missed: tuple[int, int]) -> None:
        """Request a range once more, because it has not come."""
        chunk = self.left[number]
        chunk.running -= 1
        chunk.ranges.appendleft(missed)

    def came(self, number: int) -> bool:
        """Note that a range has come, and tell whether its chunk is there now.

        Raises WrongBytesError.
        """
        chunk = self.left[number]
        chunk.running -= 1
        if chunk.running or chunk.ranges:
            return False
        if self.proof.proves(number):
            del self.left[number]
            return True
        chunk.tries += 1
        if chunk.tries == TRIES:
            raise WrongBytesError(
                f"{self.name}: chunk {number} of {self.chunks.size} bytes has another xxh3-64 than "
                "was stored beside it"
            )
        log.warning("%s: chunk %d is fetched once more: wrong bytes", self.name, number)
        chunk.ranges = self.ranges(number)
        return False


def download(
    transfers: StoreTransfers,
    key: str,
    fd: int,
    size: int,
    *,
    etag: str,
    digest: bytes,
    chunks: Chunks,
    renewed: Callable[[], str],
    wanted: Callable[[], Iterable[int]],
    arrived: Callable[[int], None],
) -> None:
    """Write an object of `size` bytes into an open file.

    - renewed: called when the object no longer has this ETag. It returns the present ETag of the
      same bytes, or raises.
    - wanted: called between two requests. It returns numbers of chunks that readers wait for.
    - arrived: called with the number of each chunk that is there.

    Raises WrongBytesError if a chunk or the whole has another digest, the errors of the three
    callables, and those of `Store.get`.
    """
    job = _Download(transfers, key, fd, size, chunks)
    running: dict[Future[None], tuple[int, tuple[int, int], str]] = {}
    try:
        while job.left:
            job.want(wanted())
            while len(running) < transfers.terms.parallel and (taken := job.take()):
                number, (start, length) = taken
                running[transfers.fetch(key, fd, start, length, etag)] = *taken, etag
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                number, asked, had = running.pop(done)
                try:
                    done.result()
                except ObjectChangedError:
                    if had == etag:
                        etag = renewed()
                        if had == etag:
                            raise
                    job.again(number, asked)
                    continue
                if job.came(number):
                    arrived(number)
    finally:
        for future in running:
            future.cancel()
        wait(running)
    transfers.expect_bytes(key, job.proof.digest(), digest)
