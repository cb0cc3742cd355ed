"""Leases: blocks of a prefix opened, or made, by one question; descriptors come by a socket.

A client writes questions to a namespace's `.match`, each in one call, at offset 0; little-endian:

    SOCKET   "KVS1", i32 descriptor of one end of a pair of Unix sockets, SOCK_SEQPACKET

    OPEN     "KVO1", u32 count n, u32 bytes of shard, u64 size, u64 number, shard, 16 bytes: the key
             before the first one, n x 16 bytes: keys

    MAKE     "KVN1", as OPEN, with u32 mode before the shard
    DONE     "KVD1", u32 count n, n x u64 leases
    CLOSE    "KVC1", u32 count n, n x u64 leases

SOCKET, DONE and CLOSE are complete with their write. One message at the other end of the pair
answers OPEN and MAKE. The message is there when the write returns. It has a descriptor for each
block, read only for OPEN:

    answer   as the question, u32 blocks m, u64 number of the question, u64 lease of the first one

A client that missed an answer finds it before the next one, and knows it by its number. It closes
the descriptors of that answer and gives its leases back.

A lease is like an open descriptor of the mount: the block's memory stays. It ends with CLOSE, or
with the descriptor of `.match` by which it was asked for. Leases of one answer count up from the
first.

OPEN lends the first m of the requested blocks. Each has `size` bytes, is in RAM and complete, and
the opener of `.match` may read it, as owner, by the group, or as any user. The client opens all
later blocks by name. Where a namespace has limits, it opens all blocks by name. One user has at
most half of the leases that others leave of 65,536; further blocks are opened by name too.

MAKE makes empty blocks, whose names exist immediately. It makes the first m of the requested blocks
that do not exist yet. RAM must have room for them now, and the opener of `.match` must be allowed
to make them, by the mode bits. `mode` is the blocks' mode, as of open(2), with the umask already
taken off. The client writes a block through its descriptor, closes that, and says so with DONE. A
block that has its size then is sealed. A block of another size, or whose lease ends without DONE,
is removed. A block that grows beyond its size is removed immediately. ESTALE at DONE: not all of
the named blocks have been sealed. Where a mount has a bucket, or gives names at the close, MAKE
makes nothing.

ESTALE at another question: it has no socket, or one that takes no more, so the client sends SOCKET
again. This happens after a takeover: descriptors survive it, leases do not. EINVAL: the text is no
question. EOPNOTSUPP: this mount lends nothing.

Contract: pure, the standard library and kvfs.prefix only, and the only home of the format. Raises
InvalidError, ValueError. Not for matching (`kvfs.matching`).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.errors import InvalidError
from kvfs.prefix import KEY_BYTES, check_key, check_shard

SOCKET, OPEN, CLOSE, MAKE, DONE = b"KVS1", b"KVO1", b"KVC1", b"KVN1", b"KVD1"
BLOCKS_MAX = 64  # of a question; the kernel hands over 253 descriptors in a message (SCM_MAX_FD)
CLOSED_MAX = 4096  # leases that a question ends
MODE_MAX = 0o777
_SOCKET = struct.Struct("<4si")
_OPEN = struct.Struct("<4sIIQQ")
_MAKE = struct.Struct("<4sIIQQI")
_CLOSE = struct.Struct("<4sI")
_ANSWER = struct.Struct("<4sIQQ")
ANSWER_SIZE = _ANSWER.size


class LeaseRequest(NamedTuple):
    """Blocks of `size` bytes; `keys[0]` comes after `parent`. shard: "" for files without one.

    number: comes back with the answer. mode: of the blocks to make; -1: to open.
    """

    parent: bytes
    keys: list[bytes]
    shard: str
    size: int
    number: int = 0
    mode: int = -1


class LeaseAnswer(NamedTuple):
    """The number of blocks, and the lease of the first of them."""

    number: int
    blocks: int
    first: int


def is_question(data: bytes) -> bool:
    """Return whether it is, or pretends to be, one of these questions."""
    return data[:4] in {SOCKET, OPEN, CLOSE, MAKE, DONE}


def pack_socket(number: int) -> bytes:
    """Return the question SOCKET."""
    return _SOCKET.pack(SOCKET, number)


def unpack_socket(data: bytes) -> int:
    """Return the descriptor of the question SOCKET. Raises InvalidError."""
    if len(data) != _SOCKET.size:
        raise InvalidError(f"a descriptor's number in {len(data)} bytes, expected {_SOCKET.size}")
    number = _SOCKET.unpack(data)[1]
    if number < 0:
        raise InvalidError(f"descriptor {number}, expected at least 0")
    assert isinstance(number, int)
    return number


def pack_request(request: LeaseRequest) -> bytes:
    """Return the question OPEN or MAKE. Raises ValueError."""
    check_key(request.parent, "parent")
    if len(request.keys) > BLOCKS_MAX:
        raise ValueError(f"{len(request.keys)} keys, at most {BLOCKS_MAX} in a question")
    joined = b"".join(request.keys)
    if len(joined) != KEY_BYTES * len(request.keys):
        raise ValueError(f"keys: expected {KEY_BYTES} bytes each")
    shard = check_shard(request.shard).encode() if request.shard else b""
    about = (len(request.keys), len(shard), request.size, request.number)
    make = request.mode >= 0
    header = _MAKE.pack(MAKE, *about, request.mode) if make else _OPEN.pack(OPEN, *about)
    return header + shard + request.parent + joined


def unpack_request(data: bytes) -> LeaseRequest:
    """Return the request of the question OPEN or MAKE. Raises InvalidError."""
    header = _MAKE if data.startswith(MAKE) else _OPEN
    if len(data) < header.size:
        raise InvalidError(f"request of {len(data)} bytes, expected {header.size} at least")
    _, count, named, size, number, *modes = header.unpack_from(data)
    at = header.size + named
    if count > BLOCKS_MAX:
        raise InvalidError(f"{count} keys, at most {BLOCKS_MAX} in a question")
    if len(data) != at + KEY_BYTES * (1 + count):
        expected = at + KEY_BYTES * (1 + count)
        raise InvalidError(f"request of {len(data)} bytes, expected {expected}")
    try:
        shard = data[header.size : at].decode("ascii")
        if named:
            check_shard(shard)
    except ValueError as error:
        raise InvalidError(f"shard: {error}") from None
    parent, *keys = (data[start : start + KEY_BYTES] for start in range(at, len(data), KEY_BYTES))
    mode = modes[0] if modes else -1
    if mode > MODE_MAX:
        raise InvalidError(f"mode {mode:#o}, expected at most {MODE_MAX:#o}")
    return LeaseRequest(parent, keys, shard, size, number, mode)


def pack_close(leases: Sequence[int], question: bytes = CLOSE) -> bytes:
    """Return the question CLOSE, or DONE. Raises ValueError."""
    if len(leases) > CLOSED_MAX:
        raise ValueError(f"{len(leases)} leases, at most {CLOSED_MAX} in a question")
    return _CLOSE.pack(question, len(leases)) + struct.pack(f"<{len(leases)}Q", *leases)


def unpack_close(data: bytes) -> tuple[int, ...]:
    """Return the leases of the question CLOSE or DONE. Raises InvalidError."""
    count = _CLOSE.unpack_from(data)[1] if len(data) >= _CLOSE.size else 0
    if count > CLOSED_MAX or len(data) != _CLOSE.size + 8 * count:
        raise InvalidError(f"{count} leases in a request of {len(data)} bytes")
    return struct.unpack_from(f"<{count}Q", data, _CLOSE.size)


def pack_answer(answer: LeaseAnswer, question: bytes = OPEN) -> bytes:
    """Return the message that accompanies the descriptors."""
    return _ANSWER.pack(question, answer.blocks, answer.number, answer.first)


def unpack_answer(data: bytes) -> LeaseAnswer:
    """Return the answer of a message. Raises ValueError for a malformed one."""
    if len(data) != _ANSWER.size or data[:4] not in {OPEN, MAKE}:
        raise ValueError(f"{data[:40]!r}: expected an answer, which begins with {OPEN!r}")
    _, blocks, number, first = _ANSWER.unpack(data)
    return LeaseAnswer(number, blocks, first)
