"""vLLM: the `fs` tier, the ExampleConnector, and the disk of the SimpleCPUOffloadConnector.

Source: vLLM 0.33.0. The fs tier is in v1/kv_offload/file_mapper.py and tiering/fs/io.py. Its layout
comes from llm-d's backend, which makes the same names:

    MODEL_SHA12_rRANK/HHH/HH_gGROUP/HASH.bin, with _RANDOM.tmp until it is renamed
    .o_direct_probe_RANDOM.tmp

SHA12 stands for model, dtype, block size, layers and parallelism; / in MODEL is _. The
ExampleConnector (kv_connector/v1/example_connector.py), once SharedStorageConnector:

    DIGEST/LAYER.safetensors, .tmpXXXXXX until it is renamed, as safetensors does it

DIGEST is the MD5 of the prompt's token ids (SHA-256 on a machine that forbids MD5). The disk of
SimpleCPUOffloadConnector (v1/simple_kv_offload/worker.py) is one file, PATH.rank_N. None of these
names has a block's parent. Not for config.json, which names no block.
"""

import re

from kvfs.layouts.block import MISS, SAFETENSORS_TMP, Block, Directory, Life, block, text

LIVES = {
    "vllm-fs": MISS,
    "vllm-example": Life(
        droppable=False,
        why="the directory is the hit: a file missing in it is an exception in the worker",
    ),
    "vllm-disk": Life(
        droppable=False, why="slots in one file, whose index is in the process", pool=True
    ),
}

_FS = re.compile(
    rb"([^/]*)_([0-9a-f]{12})_r([0-9]+)/[0-9a-f]{3}/[0-9a-f]{2}_g([0-9]+)/"
    rb"([0-9a-f]+)\.bin(_[0-9A-Za-z]+\.tmp)?"
)
_PROBE = re.compile(rb"\.o_direct_probe_[0-9A-Za-z]+\.tmp")
_DIGEST = re.compile(rb"[0-9a-f]{32}|[0-9a-f]{64}")
_RANK = re.compile(rb".+\.rank_([0-9]+)", re.DOTALL)


def fs(directory: Directory, name: bytes) -> Block | None:
    """Recognise names ending in .bin, and in .tmp while they are written."""
    found = _FS.fullmatch(b"/".join((*directory[-3:], name)))
    if found is None:
        return None
    model, configuration, rank, shard, digest, unfinished = found.groups()
    return block(
        *("vllm", "vllm-fs", directory[:-3], b"%b_%b/%b" % (model, configuration, digest)),
        kind=("vllm-fs", text(model), text(shard)),
        model=text(model),
        rank=int(rank),
        shard=text(shard),
        block=text(digest),
        temporary=unfinished is not None,
    )


def probe(directory: Directory, name: bytes) -> Block | None:
    """Recognise the fs tier's test file for O_DIRECT, written and unlinked at its start."""
    if _PROBE.fullmatch(name) is None:
        return None
    return block("vllm", "vllm-fs", directory, name, temporary=True)


def example(directory: Directory, name: bytes) -> Block | None:
    """Recognise layers: all files of the directory are one group."""
    if not directory or _DIGEST.fullmatch(directory[-1]) is None:
        return None
    unfinished = SAFETENSORS_TMP.fullmatch(name) is not None
    layer = b"" if unfinished else name.removesuffix(b".safetensors")
    if layer == name:
        return None
    return block(
        *("vllm", "vllm-example", directory[:-1], directory[-1]),
        shard=text(layer),
        block=text(directory[-1]),
        temporary=unfinished,
    )


def disk(directory: Directory, name: bytes) -> Block | None:
    """Recognise the one file of a rank."""
    found = _RANK.fullmatch(name)
    if found is None:
        return None
    return block("vllm", "vllm-disk", directory, name, rank=int(found[1]))
