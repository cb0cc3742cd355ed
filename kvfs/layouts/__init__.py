"""The facts in connectors' file names: engine, model, rank, shard, block, and the file's group.

Contract: pure, and any bytes are a name: `recognise` returns None for an unknown name, and never
raises. It is called once when a file is created or renamed, and takes 1 to 5 us. Its result decides
where a file begins (`Block.kind`), which files leave together (`Block.key`), in which order
(`Block.parent_key`) and whether at all (`LIVES`). A module for each family of engines has the
formats and their sources.
"""

from collections.abc import Callable

from kvfs.layouts import lmcache, others, prefix, vllm
from kvfs.layouts.block import Block, Directory, Kind, Life, key_of
from kvfs.layouts.others import link

__all__ = ["LIVES", "Block", "Directory", "Kind", "Life", "key_of", "link", "recognise"]

Reader = Callable[[Directory, bytes], Block | None]

# By the text after the last dot: most names are refused by one look-up and one expression.
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
# In these the text after the last dot differs from file to file.
_OTHERS: tuple[Reader, ...] = (
    *(vllm.disk, others.whole, vllm.example, lmcache.gds),
    others.vua_unfinished,
)

LIVES: dict[str, Life] = {**lmcache.LIVES, **vllm.LIVES, **others.LIVES, **prefix.LIVES}


def recognise(directory: Directory, name: bytes) -> Block | None:
    """Return the facts of a name; None if no connector makes such names.

    `directory` has the names of the directories from the namespace down, without it.
    """
    if (found := prefix.block(directory, name)) is not None:  # for any name of its shard
        return found
    for read in _READERS.get(name[name.rfind(b".") + 1 :], _OTHERS):
        block = read(directory, name)
        if block is not None:
            return block
    return None
