"""What connectors' file names say: engine, model, rank, shard, block, and which files are one.

Contract: pure, and any bytes are a name: `recognise` says None to what it does not know, and never
raises. It is called once when a file is sealed or renamed, and costs 1 to 4 us. What it says
decides which files leave together (`Block.key`), in which order (`Block.parent_key`) and whether at
all (`LIVES`). A module for each family of engines has the formats and where they were read.
"""

from collections.abc import Callable

from kvfs.layouts import lmcache, others, prefix, vllm
from kvfs.layouts.block import Block, Directory, Life, key_of
from kvfs.layouts.others import link

__all__ = ["LIVES", "Block", "Directory", "Life", "key_of", "link", "recognise"]

Reader = Callable[[Directory, bytes], Block | None]

# By what follows the last dot: most names are refused by one look-up and one expression.
_READERS: dict[bytes, tuple[Reader, ...]] = {
    b"bin": (others.sglang_page, vllm.fs, lmcache.slot, others.transfer),
    b"bucket": (others.bucket,),
    b"data": (lmcache.data,),
    b"meta": (others.bucket,),
    b"metadata": (lmcache.gds,),
    b"pt": (lmcache.local_disk,),
    b"safetensors": (others.vua_block, vllm.example, lmcache.gds, others.vua_layer),
    b"tmp": (vllm.fs, others.sglang_unfinished, lmcache.unfinished, vllm.probe),
    b"weka1": (lmcache.gds,),
}
# What follows the last dot differs from file to file.
_OTHERS: tuple[Reader, ...] = (vllm.disk, others.whole, vllm.example, lmcache.gds)

LIVES: dict[str, Life] = {**lmcache.LIVES, **vllm.LIVES, **others.LIVES, **prefix.LIVES}


def recognise(directory: Directory, name: bytes) -> Block | None:
    """Return what the name says; None if no connector makes such names.

    `directory` has the names of the directories from the namespace down, without it.
    """
    if (found := prefix.block(directory, name)) is not None:  # whatever its shard is called
        return found
    for read in _READERS.get(name[name.rfind(b".") + 1 :], _OTHERS):
        block = read(directory, name)
        if block is not None:
            return block
    return None
