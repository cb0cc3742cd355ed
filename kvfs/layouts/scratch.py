"""Files that a process keeps for itself: the index is in its memory, or in a server.

Dropping one behind its back is not a miss but a defect, so all of them are only moved. Sources:
Dynamo's KVBM (lib/llm/src/block_manager/storage/disk.rs), Mooncake's bucket backend
(storage_backend.h), the 3FS clients of SGLang and vLLM, TensorRT-LLM (kvCacheTransferManager.cpp).
Not for what others find by its name.
"""

import re

from kvfs.layouts.block import Block, Directory, Life, group, text

LIVES = {
    "dynamo-kvbm": Life(
        droppable=False, why="one file is the whole cache; it is unlinked while it is used"
    ),
    "mooncake-bucket": Life(
        droppable=False, why="the master knows what is in it; a bucket without .meta is deleted"
    ),
    "hf3fs": Life(droppable=False, why="pages in one file, whose index is in a server"),
    "tensorrt-llm": Life(droppable=False, why="found by block ids that only the process knows"),
}

_BUCKET = re.compile(rb"([0-9]+-[0-9]+)\.(bucket|meta)")
_TRANSFER = re.compile(rb"block_([0-9]+)_pool_([0-9]+)\.bin")
_KVBM = b"dynamo-kvbm-disk-cache-"
_HF3FS = re.compile(rb"hf3fs_vllm_data_file_([0-9]+)")


def _private(
    engine: str, layout: str, directory: Directory, name: bytes, *, rank: int | None = None
) -> Block:
    whole = group(layout.encode(), directory, name)
    return Block(engine, layout, whole, rank=rank, block=text(name))


def bucket(directory: Directory, name: bytes) -> Block | None:
    """A bucket of Mooncake and the file that describes it are one group."""
    found = _BUCKET.fullmatch(name)
    if found is None:
        return None
    return _private("mooncake", "mooncake-bucket", directory, found[1])


def transfer(directory: Directory, name: bytes) -> Block | None:
    """TensorRT-LLM's: all pools of a block are one group."""
    found = _TRANSFER.fullmatch(name)
    if found is None:
        return None
    return _private("tensorrt-llm", "tensorrt-llm", directory, found[1])


def whole(directory: Directory, name: bytes) -> Block | None:
    """The caches that are one file."""
    if name.startswith(_KVBM):
        return _private("dynamo", "dynamo-kvbm", directory, name)
    found = _HF3FS.fullmatch(name)
    if found is None:
        return None
    return _private("hf3fs", "hf3fs", directory, name, rank=int(found[1]))
