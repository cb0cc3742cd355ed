"""SGLang: the pages of HiCacheFile, `--hicache-storage-backend file`.

Source: SGLang 0.5.23, `HiCacheFile.__init__` and `_get_suffixed_key`
(srt/mem_cache/hicache_storage.py):

    HASH[.POOL]_MODEL[_TP-RANK_TP-SIZE][_PP-SIZE_PP-RANK][_cpRANK_SIZE]
        [_tpSIZE_dcpRANK_SIZE_pagePAGE].bin
    .UUID.tmp until it is renamed

HASH is the SHA-256 of the prefix, / in MODEL is -. TP-RANK and TP-SIZE are missing where the ranks
of a model with latent attention share one file; a rank is below its size, which tells the two pairs
apart although their orders differ. A state pool of such a model has them, so a group leaves them
out. Neither a page's parent nor its dtype is in the name. Not for the nixl backend's names.
"""

import re

from kvfs.layouts.block import Block, Directory, Life, group, text

LIVES = {"sglang-file": Life(droppable=True, why="a file that is gone is a miss")}

# PoolName, longest first; one that is not known here ends at its first underscore.
_POOLS = (
    "deepseek_v4_c1_indexer_scale",
    "deepseek_v4_c2_indexer_scale",
    "deepseek_v4_c4_indexer_scale",
    "deepseek_v4_c4_indexer_state",
    "deepseek_v4_c1_indexer",
    "deepseek_v4_c2_indexer",
    "deepseek_v4_c4_indexer",
    "deepseek_v4_c128_state",
    "deepseek_v4_c128_rope",
    "deepseek_v4_c4_state",
    "deepseek_v4_c4_rope",
    "deepseek_v4_c128",
    "deepseek_v4_c1",
    "deepseek_v4_c2",
    "deepseek_v4_c4",
    "auxiliary_swa",
    "draft_indexer",
    "draft_swa",
)
_PAGE = re.compile(
    rb"([0-9a-f]{64})(?:\.(%b|[a-z0-9]+))?_(.*)\.bin" % "|".join(_POOLS).encode(), re.DOTALL
)
_PAIR = re.compile(rb"(.*)_([0-9]+)_([0-9]+)", re.DOTALL)
_CONTEXT = re.compile(rb"(.*)_cp[0-9]+_[0-9]+", re.DOTALL)
_DECODE = re.compile(rb"(.*)_tp([0-9]+)_dcp([0-9]+)_[0-9]+_page[0-9]+", re.DOTALL)
_UNFINISHED = re.compile(rb"\.[0-9a-f]{32}\.tmp")


def page(directory: Directory, name: bytes) -> Block | None:
    """Names ending in .bin."""
    found = _PAGE.fullmatch(name)
    if found is None:
        return None
    block, pool, rest = found.groups()
    model, rank, world = _ranks(rest)
    return Block(
        "sglang",
        "sglang-file",
        group(b"sglang-file", directory, b"%b_%b" % (block, model)),
        model=text(model),
        rank=rank,
        world=world,
        shard=text(pool or b""),
        block=text(block),
    )


def _ranks(rest: bytes) -> tuple[bytes, int | None, int | None]:
    """Model, rank and size of what follows the hash."""
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


def unfinished(directory: Directory, name: bytes) -> Block | None:
    """A page on its way; which one, only the rename says."""
    if _UNFINISHED.fullmatch(name) is None:
        return None
    whole = group(b"sglang-file", directory, name)
    return Block("sglang", "sglang-file", whole, temporary=True)
