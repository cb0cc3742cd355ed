"""kvfs's own prefix paths: the one layout whose names say the order of blocks.

The format, for whoever writes caches on a mount and chooses the names:

    HHHHHHHHHHHHHHHH-PPPPPPPPPPPPPPPP[.rRANK].kv, and .kv.tmp until it is renamed

H is the block's hash and P its parent's, 16 lower-case hexadecimal digits each; P is all zeros for
the first block of a prompt. The hash must stand for the whole prefix up to the block's end and for
all that makes its bytes differ: model, dtype, block size. RANK is a decimal number where the ranks
write files of their own. Directories are free to choose; blocks of one prompt are in one. Whatever
is in the file is its writer's business.
"""

import re

from kvfs.layouts.block import Block, Directory, Life, group, text

LIVES = {"kvfs-prefix": Life(droppable=True, why="a file that is gone is a miss")}

_FIRST = b"0" * 16
_NAME = re.compile(rb"([0-9a-f]{16})-([0-9a-f]{16})(?:\.r([0-9]{1,6}))?\.kv(\.tmp)?")


def name(block: int, parent: int = 0, rank: int | None = None) -> bytes:
    """Return the name of a block's file; hashes are unsigned and of 64 bits, 0 is no parent."""
    suffix = "" if rank is None else f".r{rank}"
    return f"{block:016x}-{parent:016x}{suffix}.kv".encode()


def block(directory: Directory, name: bytes) -> Block | None:
    """Names ending in .kv, and in .kv.tmp while they are written."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    own, parent, rank, unfinished = found.groups()
    first = parent == _FIRST
    return Block(
        "kvfs",
        "kvfs-prefix",
        group(b"kvfs-prefix", directory, own),
        b"" if first else group(b"kvfs-prefix", directory, parent),
        rank=None if rank is None else int(rank),
        block=text(own),
        parent=None if first else text(parent),
        temporary=unfinished is not None,
    )
