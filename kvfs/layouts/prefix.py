"""kvfs's own prefix paths: a directory is a prefix, its entries are its continuations.

The format is that of `kvfs.prefix`, below a namespace's directory or any other:

    PARENT/KEY[.SHARD], and PARENT/KEY[.SHARD].RANDOM.tmp until it is renamed

A key stands for the whole prefix up to its block's end, and for all else that changes its bytes, so
groups need no directory. It is XXH3-128; a policy takes its first 63 bits unchanged. A file that
waits for its rename is no block yet, but has its parent already.
"""

import re

from xxhash import xxh3_64_intdigest

from kvfs.layouts.block import MISS, Block, Directory, text

LIVES = {"kvfs-prefix": MISS}

NUMBER_MAX = (1 << 63) - 1
_KEY = re.compile(rb"[0-9a-f]{32}")
_NAME = re.compile(rb"([0-9a-f]{32})(?:\.([0-9A-Za-z_-]{1,32}))?(\.[0-9a-z]{1,32}\.tmp)?")


def block(directory: Directory, name: bytes) -> Block | None:
    """Recognise names of 32 hexadecimal digits and more, in a directory with such a name."""
    if len(name) < 32 or not directory or len(directory[-1]) != 32:  # noqa: PLR2004 (of a key)
        return None
    found, parent = _NAME.fullmatch(name), directory[-1]
    if found is None or not _KEY.fullmatch(parent):
        return None
    own, shard, unfinished = found.groups()
    return Block(
        "kvfs",
        "kvfs-prefix",
        _group(name if unfinished else own),
        _group(parent),
        shard=text(shard or b""),
        block=text(own),
        parent=text(parent),
        temporary=unfinished is not None,
        kind=("kvfs-prefix", text(shard or b"")),
        number=0 if unfinished else number(bytes.fromhex(text(own))),
        parent_number=number(bytes.fromhex(text(parent))),
    )


def _group(name: bytes) -> bytes:
    return b"kvfs-prefix:%b" % name


def number(key: bytes) -> int:
    """Return a policy's number of a block, from the 16 bytes of its key."""
    return (int.from_bytes(key[:8], "big") & NUMBER_MAX) or 1


def file_number(number: int, shard: bytes) -> int:
    """Return the number of one file of a block; without shards it is the block's."""
    return (number ^ xxh3_64_intdigest(shard)) & NUMBER_MAX if shard else number
