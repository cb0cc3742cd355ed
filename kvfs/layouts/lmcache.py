"""LMCache: the names of its four ways to keep chunks in files, and of its pool of slots.

Source: LMCache 0.5.6. `CacheEngineKey.to_string` (lmcache/utils.py) is

    MODEL@WORLD@WORKER@HASH@DTYPE[@LAYER][@TAG%VALUE]...

with HASH in hexadecimal, negative where Python's own hash made it. Around it:

    local_disk_backend.py       / in it is -      .pt
    connector/fs_connector.py   / in it is -SEP-  .data; .tmp until it is renamed
    gds_backend.py              quoted as in URLs, under II/JJ of the hash in decimal:
                                .kvcache.safetensors (on Weka .weka1), and beside it the same
                                with .metadata; either with .tmpXXXXXXXX until it is renamed
    l2_adapters/fs_l2_adapter.py and the native fs_native:
                                MODEL@0xRANKS@GROUP@HASH[@SALT].data; .tmp until it is renamed
    nixl_storage_backend.py     obj_SLOT_XXXX.bin, the slots of a pool

RANKS packs, a byte each, world size, rank, local world size and local rank
(`ObjectKey.ComputeKVRank`, distributed/api.py). A chunk's parent is in none of them: HASH is that
of the whole prefix. With LMCache's `relative_tmp_dir` an unfinished file has its final name, in
another directory, and is not known as temporary. Not for the contents.
"""

import re
from urllib.parse import unquote_to_bytes

from kvfs.layouts.block import MISS, Block, Directory, Life, block, text

LIVES = {
    "lmcache-local-disk": Life(
        droppable=False,
        why="its index is in the process: a file that is gone raises KeyError, later its own "
        "eviction FileNotFoundError",
    ),
    "lmcache-fs": MISS,
    "lmcache-l2-fs": MISS,
    "lmcache-gds": Life(droppable=True, why="a read that fails takes the chunk out of its index"),
    "lmcache-nixl-pool": Life(
        droppable=False,
        why="slots whose index is in the process, opened once at its start",
        pool=True,
    ),
}

# A model's name may contain an @; it ends at the first place after which the rest fits.
_ENGINE = re.compile(
    rb"([^@]*(?:@[^@]*)*?)@([0-9]+)@([0-9]+)@(-?[0-9a-f]+)@([a-z][a-z0-9_]*)"
    rb"(?:@([0-9]+))?((?:@[^@%]*%[^@]*)*)"
)
# `TORCH_DTYPE_TO_STR_DTYPE` there; the bytes themselves tell more of one-byte numbers.
_ELEMENT_SIZES = {
    **dict.fromkeys((b"half", b"bfloat16", b"int16"), 2),
    **dict.fromkeys((b"float", b"int32"), 4),
    **dict.fromkeys((b"double", b"int64"), 8),
}
_L2 = re.compile(rb"([^@]*)@0x([0-9a-f]{8,16})@([0-9a-f]+)@([0-9a-f]*)((?:@[^@]*)?)")
_GDS = re.compile(
    rb"(.+)(?:\.kvcache\.safetensors|\.weka1)(\.metadata)?(\.tmp[0-9a-f]{8})?", re.DOTALL
)
_SLOT = re.compile(rb"obj_([0-9]+)_[0-9a-f]{4}\.bin")


def _engine_key(
    layout: str,
    directory: Directory,
    stem: bytes,
    slash: bytes,
    *,
    temporary: bool,
    part: str = "",
) -> Block | None:
    found = _ENGINE.fullmatch(stem)
    if found is None:
        return None
    model, world, worker, chunk, dtype, layer, tags = found.groups()
    whole = b"%b@%b@*@%b@%b%b" % (model, world, chunk, dtype, tags)
    name = text(model.replace(slash, b"/") if slash else model)
    return block(
        *("lmcache", layout, directory, whole),
        kind=(layout, name, part),
        model=name,
        rank=int(worker),
        world=int(world),
        shard=text(layer or b""),
        block=text(chunk),
        temporary=temporary,
        element_size=_ELEMENT_SIZES.get(dtype),
    )


def local_disk(directory: Directory, name: bytes) -> Block | None:
    """Recognise names ending in .pt."""
    return _engine_key("lmcache-local-disk", directory, name[:-3], b"", temporary=False)


def data(directory: Directory, name: bytes) -> Block | None:
    """Recognise names ending in .data: the fs connector's and the L2 adapters'."""
    return _shared(directory, name[:-5], temporary=False)


def unfinished(directory: Directory, name: bytes) -> Block | None:
    """Recognise the same names ending in .tmp; all writers of a chunk use one name."""
    return _shared(directory, name[:-4], temporary=True)


def _shared(directory: Directory, stem: bytes, *, temporary: bool) -> Block | None:
    found = _L2.fullmatch(stem)
    if found is None:
        return _engine_key("lmcache-fs", directory, stem, b"-SEP-", temporary=temporary)
    model, ranks, shard, chunk, salt = found.groups()
    packed = int(ranks, 16)
    whole = b"%b@%x@%b%b" % (model, packed >> 24, chunk, salt)
    name = text(model.replace(b"-SEP-", b"/"))
    return block(
        *("lmcache", "lmcache-l2-fs", directory, whole),
        kind=("lmcache-l2-fs", name, text(shard)),
        model=name,
        rank=packed >> 16 & 0xFF,
        world=packed >> 24,
        shard=text(shard),
        block=text(chunk),
        temporary=temporary,
    )


def gds(directory: Directory, name: bytes) -> Block | None:
    """Recognise data and metadata of a chunk, which are one group."""
    found = _GDS.fullmatch(name)
    if found is None:
        return None
    stem = unquote_to_bytes(found[1])
    return _engine_key(
        *("lmcache-gds", directory, stem, b""),
        temporary=found[3] is not None,
        part=text(found[2] or b""),
    )


def slot(directory: Directory, name: bytes) -> Block | None:
    """Recognise a slot of the NIXL backend's pool; only the process knows its content."""
    found = _SLOT.fullmatch(name)
    if found is None:
        return None
    return block("lmcache", "lmcache-nixl-pool", directory, name, shard=text(found[1]))
