"""A mover reads an object of a peer, and verifies its digest.

Contract: runs in a worker process, or for a small object in a thread of the daemon; any number of
threads may call. It decides nothing, and knows no catalog. The file appears under its name only
complete, with the right digest and the modification time of every copy. Calls raise PeerError for
the peer's fault, OSError for the local file, ConfigError for our certificate; nothing is left
behind. A peer that sends other bytes is at fault, too.

`stream` lets programs read the file meanwhile, as `kvfs.movement.streams` says. All chunks come in
one answer, for which the peer keeps the file open, so an unlink there does not end it. A chunk for
which a reader waits comes earlier, by a request of its own.

The file is written and not mapped: a full tier is an error then, and not a signal.
"""

import os
from contextlib import suppress
from typing import NamedTuple

import xxhash

from kvfs.movement import streams
from kvfs.movement.copying import Moved
from kvfs.movement.files import complete, part
from kvfs.movement.streams import Ends, Word, WordKind
from kvfs.pool.errors import NoFileError, PeerError, WrongChunkError
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
        Answer(source, size) as answer,  # before programs can open the file: the peer has it open
        streams.coming(destination, size, touched_ns, out) as coming,
    ):
        stream = _Stream(source, coming, Proof(coming, size, chunks, destination), out)
        while stream.left:
            stream.take(answer)
            for word in streams.hear(inp):
                if word.number != answer.at // chunks.size:  # else it is the next one anyway
                    stream.take_early(word.number)
        if stream.proof.digest() != digest:
            raise PeerError(f"{source}: its bytes do not have the digest announced")
        blocks = os.fstat(coming).st_blocks
    return Moved(digest, blocks)


class _Stream:
    """The chunks of one object as they come. `left`: those that are not here."""

    def __init__(self, source: PeerFile, coming: int, proof: Proof, out: int) -> None:
        self.source = source
        self.proof = proof
        self.left = set(range(len(proof.chunks.digests)))
        self._coming = coming
        self._out = out

    def take(self, answer: Answer) -> None:
        """Take the next chunk of an answer. Bytes that are here already do not change."""
        number, size = answer.at // self.proof.chunks.size, self.proof.size
        end = min(answer.at + self.proof.chunks.size, size)
        while answer.at < end:
            at, data = answer.at, answer.read(min(CHUNK, end - answer.at))
            if number in self.left:
                _write(self._coming, data, at)
        if number not in self.left:
            return
        if not self.proof.proves(number):
            raise WrongChunkError(f"{self.source}: chunk {number} has another xxh3-64")
        self.left.discard(number)
        streams.tell(self._out, Word(WordKind.HERE, number))

    def take_early(self, number: int) -> None:
        """Take a chunk for which a reader waits, by another request.

        If the file was unlinked meanwhile, the chunk comes in its turn.
        """
        if number in self.left:
            start = number * self.proof.chunks.size
            with suppress(NoFileError), Answer(self.source, self.proof.size, start) as answer:
                self.take(answer)


def _write(out: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(out, data, at)
        data, at = data[count:], at + count
