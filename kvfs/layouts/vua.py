"""VAST's VUA: a directory for each block, and a link to the directory of the block before it.

Source: vast-data/VUA 3eb853e. The library, src/vua/core.py:

    SHA1/_data.safetensors, SHA1/_tokens.safetensors, SHA1/parent -> ../SHA1 of the parent

written in SHA1.tmp, which is renamed as a whole. SHA1 is that of the prefix's tokens; the model is
not in it, so each needs a directory. Both files are one group, before and after the rename. Its
connector for vLLM, src/vua/vllm/kv_connector_v1.py, does not use the library:

    RANK%SHA1/LAYER.safetensors

written in place, without a link. Not for the layout of older versions, with directories inside each
other.
"""

import re

from kvfs.layouts.block import Block, Directory, Life, group, key, text

LIVES = {
    "vua": Life(
        droppable=True,
        why="a file that is gone is a miss; but deepest first: the blocks that are found are taken "
        "for a prefix even if one between them is missing",
    ),
    "vua-vllm": Life(
        droppable=False,
        why="the directory is the hit: a file missing in it is an exception in the worker",
    ),
}

_SHARDS = {b"_data.safetensors": "data", b"_tokens.safetensors": "tokens"}
_SHA1 = re.compile(rb"([0-9a-f]{40})(\.tmp)?")
_RANKED = re.compile(rb"([0-9]+)%([0-9a-f]{40})")
_TARGET = re.compile(rb"\.\./([0-9a-f]{40})")


def block(directory: Directory, name: bytes) -> Block | None:
    """The two files of a block."""
    shard = _SHARDS.get(name)
    found = _SHA1.fullmatch(directory[-1]) if shard and directory else None
    if shard is None or found is None:
        return None
    return Block(
        "vua",
        "vua",
        group(b"vua", directory[:-1], found[1]),
        shard=shard,
        block=text(found[1]),
        temporary=found[2] is not None,
    )


def layer(directory: Directory, name: bytes) -> Block | None:
    """All layers of all ranks of a block are one group."""
    found = _RANKED.fullmatch(directory[-1]) if directory else None
    stem = name.removesuffix(b".safetensors")
    if found is None or stem == name:
        return None
    return Block(
        "vua",
        "vua-vllm",
        group(b"vua-vllm", directory[:-1], found[2]),
        rank=int(found[1]),
        shard=text(stem),
        block=text(found[2]),
    )


def link(directory: Directory, name: bytes, target: bytes) -> tuple[int, int] | None:
    """Return the keys of a block and of its parent, if this symbolic link says them.

    `directory` is where the link is, from the namespace down.
    """
    if name != b"parent" or not directory:
        return None
    child, parent = _SHA1.fullmatch(directory[-1]), _TARGET.fullmatch(target)
    if child is None or parent is None:
        return None
    root = directory[:-1]
    return key(group(b"vua", root, child[1])), key(group(b"vua", root, parent[1]))
