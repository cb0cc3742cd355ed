"""A mover reads an object of a peer, and verifies its digest.

Contract: runs in a worker process, or for a small object in a thread of the daemon; any number of
threads may call. It decides nothing, and knows no catalog. The file appears under its name only
complete, with the right digest and the modification time of every copy. Calls raise PeerError for
the peer's fault, OSError for the local file, ConfigError for our certificate; nothing is left
behind. A peer that sends other bytes is at fault, too.

`stream` lets programs read the file meanwhile, as `kvfs.movement.streams` says. All chunks come in
one answer, so an unlink at the peer does not end it. Only a reader that waits for another chunk
than the next one begins another answer.

The file is written and not mapped: a full tier is an error then, and not a signal.
"""

import os
from collections import deque
from typing import NamedTuple

import xxhash

from kvfs.movement import streams
from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, part
from kvfs.movement.streams import Ends, Word, WordKind
from kvfs.pool.errors import PeerError
from kvfs.pool.peer_file import CHUNK, Answer, PeerFile
from kvfs.s3.chunks import Chunks, Proof


class FetchJob(NamedTuple):
    """A file of a peer and where its bytes go. `size`, `digest`: what they must be."""

    source: PeerFile
    destination: str
    size: int
    digest: bytes
    touched_ns: int


def fetch(wanted: FetchJob) -> Moved:
    """Fetch an object. Raises PeerError, OSError."""
    source, destination, size, digest, touched_ns = wanted
    with part(destination) as out:
        if size:
            os.truncate(out, size)  # tells tmpfs that huge pages will be within the size
        hasher = xxhash.xxh3_128()
        with Answer(source, size) as answer:
            while answer.at < size:
                at, data = answer.at, answer.read(CHUNK)
                hasher.update(data)
                _write(out, data, at)
            if hasher.digest() != digest:
                raise PeerError(f"{source}: its bytes do not have the digest announced")
        os.utime(out, ns=(touched_ns, touched_ns))
        blocks = os.fstat(out).st_blocks
        complete(destination)
    return Moved(digest, blocks)


def stream(wanted: FetchJob, chunks: Chunks, ends: Ends) -> Moved:
    """Fetch an object, and tell the daemon of each chunk that is here.

    Raises PeerError, OSError.
    """
    source, destination, size, digest, touched_ns = wanted
    with (
        streams.talking(ends) as (out, inp),
        streams.coming(destination, size, touched_ns, out) as coming,
    ):
        proof = Proof(coming, size, chunks, destination)
        order = _Order(len(chunks.digests), inp)
        while order.left:
            with Answer(source, size, order.next * chunks.size) as answer:
                while order.left and order.next * chunks.size == answer.at:
                    end = min(answer.at + chunks.size, size)
                    while answer.at < end:
                        at, data = answer.at, answer.read(min(CHUNK, end - answer.at))
                        _write(coming, data, at)
                    if not proof.proves(order.next):
                        raise PeerError(f"{source}: chunk {order.next} has another xxh3-64")
                    streams.tell(out, Word(WordKind.HERE, order.next))
                    order.go_on()
        if proof.digest() != digest:
            raise PeerError(f"{source}: its bytes do not have the digest announced")
        blocks = os.fstat(coming).st_blocks
    return Moved(digest, blocks)


class _Order:
    """The order of the chunks: those that readers wait for, each in its turn, and those behind."""

    def __init__(self, count: int, inp: int) -> None:
        """inp: the pipe with the words of the daemon."""
        self.left = set(range(count))
        self.next = 0
        self._inp = inp
        self._wanted: deque[int] = deque()

    def go_on(self) -> None:
        """Note that the chunk `next` is here, and choose another, if any is left."""
        self.left.discard(self.next)
        behind = [number for number in self.left if number > self.next] or self.left
        self.next = min(behind, default=self.next)
        self._wanted += [word.number for word in streams.hear(self._inp)]
        while self._wanted:
            if (number := self._wanted.popleft()) in self.left:
                self.next = number
                break


def _write(out: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(out, data, at)
        data, at = data[count:], at + count
