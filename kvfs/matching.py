"""The question how much of a prefix is cached, and its answer, in the format of `NAMESPACE/.match`.

A client makes a pwrite(2) of the request at offset 0 and a pread(2) of the answer, on a descriptor
of its own. All little-endian and packed:

    request  "KVM1", u32 flags, u32 keys n, u32 bytes of shards' names s,
             s bytes: names joined by "," (none: files without shard),
             16 bytes: the key before the first one, n x 16 bytes: keys

    answer   "KVM1", u32 blocks m, u64 bytes of these in RAM, u64 on NVMe and not in RAM,
             u64 in the bucket only; with DETAILS m x u8 tiers (RAM | NVME | BUCKET: all files of
             the block are there), m x u64 bytes of all files of the block

A block counts if all its requested files are there, and if all blocks before it in the request
count.

Contract: pure, the standard library and kvfs.prefix only, and the only home of the format. Raises
InvalidError, ValueError. Not for finding the answer (`core/lending/matching.py`).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.errors import InvalidError
from kvfs.prefix import KEY_BYTES, check_key, check_shard

NAME = ".match"
MAGIC = b"KVM1"
DETAILS = 1  # a flag
RAM, NVME, BUCKET = 1, 2, 4
KEYS_MAX = 65536
FILES_MAX = 1 << 20  # keys times shards
HEADER = struct.Struct("<4sIII")
SHARDS_MAX = 1 << 16  # bytes
_ANSWER = struct.Struct("<4sIQQQ")


class MatchRequest(NamedTuple):
    """One request. `keys` are n x 16 bytes; `shards` has "" alone for files without one."""

    flags: int
    shards: tuple[str, ...]
    parent: bytes
    keys: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


class MatchAnswer(NamedTuple):
    """Bytes by tier, each counted where it is fastest; `tiers` and `sizes` only with DETAILS."""

    blocks: int
    ram: int
    nvme: int
    bucket: int
    tiers: bytes = b""
    sizes: tuple[int, ...] = ()


def request_size(header: bytes) -> int:
    """Return the bytes of a request with this header. Raises InvalidError."""
    if len(header) < HEADER.size:
        raise InvalidError(f"request of {len(header)} bytes, expected {HEADER.size} at least")
    magic, flags, count, named = HEADER.unpack_from(header)
    assert isinstance(count, int)
    assert isinstance(named, int)
    if magic != MAGIC:
        raise InvalidError(f"request begins with {magic!r}, expected {MAGIC!r}")
    if flags & ~DETAILS:
        raise InvalidError(f"flags {flags:#x}, expected 0 or {DETAILS}")
    if count > KEYS_MAX or named > SHARDS_MAX:
        raise InvalidError(
            f"{count} keys and {named} bytes of shards, at most {KEYS_MAX} and {SHARDS_MAX}"
        )
    return HEADER.size + named + KEY_BYTES * (1 + count)


def unpack_request(data: bytes) -> MatchRequest:
    """Return the request of its bytes. Raises InvalidError."""
    expected = request_size(data)
    if len(data) != expected:
        raise InvalidError(f"request of {len(data)} bytes, expected {expected}")
    _, flags, count, named = HEADER.unpack_from(data)
    at = HEADER.size + named
    try:
        shards = tuple(data[HEADER.size : at].decode("ascii").split(","))
        for shard in shards if named else ():
            check_shard(shard)
    except ValueError as error:
        raise InvalidError(f"shards: {error}") from None
    if named and "" in shards:
        raise InvalidError("shards: one of them has no name")
    if len(shards) * count > FILES_MAX:
        raise InvalidError(f"{len(shards)} shards of {count} blocks, at most {FILES_MAX} files")
    return MatchRequest(flags, shards, data[at : at + KEY_BYTES], data[at + KEY_BYTES :])


def pack_request(
    parent: bytes, keys: Sequence[bytes], shards: Sequence[str] = (), *, details: bool = False
) -> bytes:
    """Return the bytes of a request. Raises ValueError.

    keys: of blocks that follow each other, the first one after `parent`.
    """
    check_key(parent, "parent")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"{len(keys)} keys, at most {KEYS_MAX} in a question")
    joined, named = b"".join(keys), ",".join(map(check_shard, shards)).encode()
    if len(joined) != KEY_BYTES * len(keys):
        raise ValueError(f"keys: expected {KEY_BYTES} bytes each")
    return HEADER.pack(MAGIC, DETAILS * details, len(keys), len(named)) + named + parent + joined


def pack_answer(answer: MatchAnswer) -> bytes:
    """Return its bytes."""
    found = _ANSWER.pack(MAGIC, *answer[:4])
    return found + answer.tiers + struct.pack(f"<{len(answer.sizes)}Q", *answer.sizes)


def answer_size(keys: int, *, details: bool = False) -> int:
    """Return the most bytes that an answer has."""
    return _ANSWER.size + (9 * keys if details else 0)


def unpack_answer(data: bytes) -> MatchAnswer:
    """Return the answer of its bytes. Raises ValueError for a malformed one."""
    if len(data) < _ANSWER.size or data[:4] != MAGIC:
        raise ValueError(f"{data[:40]!r}: expected an answer, which begins with {MAGIC!r}")
    _, blocks, ram, nvme, bucket = _ANSWER.unpack_from(data)
    rest = data[_ANSWER.size :]
    if not rest:
        return MatchAnswer(blocks, ram, nvme, bucket)
    if len(rest) != 9 * blocks:
        raise ValueError(f"answer of {len(data)} bytes for {blocks} blocks")
    sizes = struct.unpack(f"<{blocks}Q", rest[blocks:])
    return MatchAnswer(blocks, ram, nvme, bucket, rest[:blocks], sizes)
