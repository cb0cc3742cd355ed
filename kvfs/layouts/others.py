"""SGLang, VUA, and files that a process keeps for itself.

SGLang, the pages of HiCacheFile, `--hicache-storage-backend file`. Source: SGLang 0.5.23,
`HiCacheFile.__init__` and `_get_suffixed_key` (srt/mem_cache/hicache_storage.py):

    HASH[.POOL]_MODEL[_TP-RANK_TP-SIZE][_PP-SIZE_PP-RANK][_cpRANK_SIZE]
        [_tpSIZE_dcpRANK_SIZE_pagePAGE].bin
    .UUID.tmp until it is renamed

HASH is the SHA-256 of the prefix, / in MODEL is -. TP-RANK and TP-SIZE are missing where the ranks
of a model with latent attention share one file. A rank is below its size, which tells the two pairs
apart although their orders differ. A state pool of such a model has both, so a group leaves them
out. The name has neither a page's parent nor its dtype. Not for the nixl backend's names.

VAST's VUA, a directory for each block, and a link to the directory of the block before it. Source:
vast-data/VUA 3eb853e. The library, src/vua/core.py:

    SHA1/_data.safetensors, SHA1/_tokens.safetensors, SHA1/parent -> ../SHA1 of the parent

It writes them in SHA1.tmp, and renames that as a whole. SHA1 is that of the prefix's tokens; the
model is not in it, so each model needs a directory. Both files are one group, before and after the
rename. VUA's connector for vLLM, src/vua/vllm/kv_connector_v1.py, does not use the library:

    RANK%SHA1/LAYER.safetensors

It writes these in place, without a link. In both, safetensors may write .tmpXXXXXX first
(`SAFETENSORS_TMP`), which does not tell the shard. Not for the layout of older versions, with
directories inside each other.

The index of all other files is in the memory of a process, or in a server. For such a process a
missing file is a defect and not a miss, so kvfs only moves these files. Sources: Dynamo's KVBM
(lib/llm/src/block_manager/storage/disk.rs), Mooncake's bucket backend (storage_backend.h), the 3FS
clients of SGLang and vLLM, TensorRT-LLM (kvCacheTransferManager.cpp).
"""

import re

from kvfs.layouts.block import (
    MISS,
    SAFETENSORS_TMP,
    Block,
    Directory,
    Life,
    block,
    group,
    key,
    text,
)

LIVES = {
    "sglang-file": MISS,
    "vua": Life(
        droppable=True,
        why="a file that is gone is a miss; but deepest first: the blocks that are found are taken "
        "for a prefix even if one between them is missing",
    ),
    "vua-vllm": Life(
        droppable=False,
        why="the directory is the hit: a file missing in it is an exception in the worker",
    ),
    "dynamo-kvbm": Life(
        droppable=False,
        why="one file is the whole cache; it is unlinked while it is used",
        pool=True,
    ),
    "mooncake-bucket": Life(
        droppable=False, why="the master knows what is in it; a bucket without .meta is deleted"
    ),
    "hf3fs": Life(droppable=False, why="pages in one file, whose index is in a server", pool=True),
    "tensorrt-llm": Life(droppable=False, why="found by block ids that only the process knows"),
}

# SGLang's PoolName, longest first; an unknown pool's name ends at its first underscore.
_POOLS = (
    *("deepseek_v4_c1_indexer_scale", "deepseek_v4_c2_indexer_scale"),
    *("deepseek_v4_c4_indexer_scale", "deepseek_v4_c4_indexer_state"),
    *("deepseek_v4_c1_indexer", "deepseek_v4_c2_indexer", "deepseek_v4_c4_indexer"),
    *("deepseek_v4_c128_state", "deepseek_v4_c128_rope"),
    *("deepseek_v4_c4_state", "deepseek_v4_c4_rope", "deepseek_v4_c128"),
    *("deepseek_v4_c1", "deepseek_v4_c2", "deepseek_v4_c4"),
    *("auxiliary_swa", "draft_indexer", "draft_swa"),
)
_PAGE = re.compile(
    rb"([0-9a-f]{64})(?:\.(%b|[a-z0-9]+))?_(.*)\.bin" % "|".join(_POOLS).encode(), re.DOTALL
)
_PAIR = re.compile(rb"(.*)_([0-9]+)_([0-9]+)", re.DOTALL)
_CONTEXT = re.compile(rb"(.*)_cp[0-9]+_[0-9]+", re.DOTALL)
_DECODE = re.compile(rb"(.*)_tp([0-9]+)_dcp([0-9]+)_[0-9]+_page[0-9]+", re.DOTALL)
_UNFINISHED = re.compile(rb"\.[0-9a-f]{32}\.tmp")
_SHARDS = {b"_data.safetensors": "data", b"_tokens.safetensors": "tokens"}
_SHA1 = re.compile(rb"([0-9a-f]{40})(\.tmp)?")
_RANKED = re.compile(rb"([0-9]+)%([0-9a-f]{40})")
_TARGET = re.compile(rb"\.\./([0-9a-f]{40})")
_BUCKET = re.compile(rb"([0-9]+-[0-9]+)\.(bucket|meta)")
_TRANSFER = re.compile(rb"block_([0-9]+)_pool_([0-9]+)\.bin")
_KVBM = b"dynamo-kvbm-disk-cache-"
_HF3FS = re.compile(rb"hf3fs_vllm_data_file_([0-9]+)")


def sglang_page(directory: Directory, name: bytes) -> Block | None:
    """Recognise names ending in .bin."""
    found = _PAGE.fullmatch(name)
    if found is None:
        return None
    digest, pool, rest = found.groups()
    model, rank, world = _ranks(rest)
    return block(
        *("sglang", "sglang-file", directory, b"%b_%b" % (digest, model)),
        kind=("sglang-file",),  # the temporary name has no more
        model=text(model),
        rank=rank,
        world=world,
        shard=text(pool or b""),
        block=text(digest),
    )


def _ranks(rest: bytes) -> tuple[bytes, int | None, int | None]:
    """Return model, rank and size from the text after the hash."""
    rank = world = None
    if b"_dcp" in rest and (found := _DECODE.fullmatch(rest)):
        rest = found[1]
        rank, world = int(found[3]), int(found[2])
    if b"_cp" in rest and (found := _CONTEXT.fullmatch(rest)):
        rest = found[1]
    found = _PAIR.fullmatch(rest)
    if found and int(found[2]) > int(found[3]):  # _PP-SIZE_PP-RANK
        rest = found[1]
        found = _PAIR.fullmatch(rest)
    if found and int(found[2]) < int(found[3]):
        return found[1], int(found[2]), int(found[3])
    return rest, rank, world


def sglang_unfinished(directory: Directory, name: bytes) -> Block | None:
    """Recognise an unfinished page; only the rename says which one it is."""
    if _UNFINISHED.fullmatch(name) is None:
        return None
    return block(*("sglang", "sglang-file", directory, name), kind=("sglang-file",), temporary=True)


def vua_block(directory: Directory, name: bytes) -> Block | None:
    """Recognise the two files of a block."""
    shard = _SHARDS.get(name, "")
    if not directory or not (shard or SAFETENSORS_TMP.fullmatch(name)):
        return None
    found = _SHA1.fullmatch(directory[-1])
    if found is None:
        return None
    return block(
        *("vua", "vua", directory[:-1], found[1]),
        kind=("vua",),  # the temporary name has no more
        shard=shard,
        block=text(found[1]),
        temporary=not shard or found[2] is not None,
    )


def vua_layer(directory: Directory, name: bytes) -> Block | None:
    """Recognise a layer; all layers of all ranks of a block are one group."""
    found = _RANKED.fullmatch(directory[-1]) if directory else None
    if found is None:
        return None
    unfinished = SAFETENSORS_TMP.fullmatch(name) is not None
    stem = b"" if unfinished else name.removesuffix(b".safetensors")
    if stem == name:
        return None
    return block(
        *("vua", "vua-vllm", directory[:-1], found[2]),
        rank=int(found[1]),
        shard=text(stem),
        block=text(found[2]),
        temporary=unfinished,
    )


def vua_unfinished(directory: Directory, name: bytes) -> Block | None:
    """Recognise the temporary names of both; only the rename says which file it is."""
    if SAFETENSORS_TMP.fullmatch(name) is None:
        return None
    return vua_block(directory, name) or vua_layer(directory, name)


def link(directory: Directory, name: bytes, target: bytes) -> tuple[int, int] | None:
    """Return the keys of a block and of its parent, if this symbolic link says them.

    `directory` is the link's place, from the namespace down.
    """
    if name != b"parent" or not directory:
        return None
    child, parent = _SHA1.fullmatch(directory[-1]), _TARGET.fullmatch(target)
    if child is None or parent is None:
        return None
    root = directory[:-1]
    return key(group(b"vua", root, child[1])), key(group(b"vua", root, parent[1]))


def bucket(directory: Directory, name: bytes) -> Block | None:
    """Recognise a bucket of Mooncake and its description, which are one group."""
    found = _BUCKET.fullmatch(name)
    if found is None:
        return None
    return block(
        *("mooncake", "mooncake-bucket", directory, found[1]),
        kind=("mooncake-bucket", text(found[2])),
        block=text(found[1]),
    )


def transfer(directory: Directory, name: bytes) -> Block | None:
    """Recognise a file of TensorRT-LLM; all pools of a block are one group."""
    found = _TRANSFER.fullmatch(name)
    if found is None:
        return None
    return block(
        *("tensorrt-llm", "tensorrt-llm", directory, found[1]),
        kind=("tensorrt-llm", text(found[2])),
        block=text(found[1]),
    )


def whole(directory: Directory, name: bytes) -> Block | None:
    """Recognise caches that are one file."""
    if name.startswith(_KVBM):
        return block("dynamo", "dynamo-kvbm", directory, name, block=text(name))
    found = _HF3FS.fullmatch(name)
    if found is None:
        return None
    return block("hf3fs", "hf3fs", directory, name, rank=int(found[1]), block=text(name))
