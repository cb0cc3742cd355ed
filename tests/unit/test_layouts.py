"""Names as the engines' sources make them; tests/connectors has the same from the real classes."""

import hashlib
import os
from typing import Any

import pytest

from kvfs import prefix as prefix_paths
from kvfs.layouts import LIVES, Block, Directory, key_of, link, recognise

SHA256 = hashlib.sha256(b"block").hexdigest()
SHA1 = hashlib.sha1(b"block", usedforsecurity=False).hexdigest()
MD5 = hashlib.md5(b"block", usedforsecurity=False).hexdigest()
VLLM = ("meta-llama_Llama-3.1-8B_0123456789ab_r3", SHA256[:3], f"{SHA256[3:5]}_g1")
UUID = "0123456789abcdef0123456789abcdef"

# Path from the namespace down, and what it says.
NAMES: list[tuple[str, dict[str, Any]]] = [
    (
        "meta-llama-Llama-3.1-8B@8@3@1234567890abcdef0000@bfloat16.pt",
        {
            "layout": "lmcache-local-disk",
            "model": "meta-llama-Llama-3.1-8B",
            "rank": 3,
            "world": 8,
            "block": "1234567890abcdef0000",
        },
    ),
    (  # one file for each layer, a negative hash from Python's hash(), a tag
        "cache/model@1@0@-3f@fp8_e4m3fn@17@user%a b.pt",
        {"layout": "lmcache-local-disk", "block": "-3f", "shard": "17", "model": "model"},
    ),
    (
        "meta-llama-SEP-Llama-3.1-8B@2@1@abc@half.data",
        {"layout": "lmcache-fs", "model": "meta-llama/Llama-3.1-8B", "rank": 1, "world": 2},
    ),
    ("m@2@1@abc@half.tmp", {"layout": "lmcache-fs", "temporary": True, "element_size": 2}),
    ("m@2@1@abc@float.data", {"layout": "lmcache-fs", "element_size": 4}),
    ("m@2@1@abc@fp8_e4m3fn.data", {"layout": "lmcache-fs", "element_size": None}),
    (  # a model's name with an @
        "m@2@1@x@2@1@abc@half.data",
        {"layout": "lmcache-fs", "model": "m@2@1@x", "block": "abc"},
    ),
    (
        f"meta-llama-SEP-Llama-3.1-8B@0x08050401@2@{SHA256}.data",
        {
            "layout": "lmcache-l2-fs",
            "model": "meta-llama/Llama-3.1-8B",
            "rank": 5,
            "world": 8,
            "shard": "2",
            "block": SHA256,
        },
    ),
    (
        f"m@0x01000100@0@{SHA256}@tenant 7.tmp",
        {"layout": "lmcache-l2-fs", "rank": 0, "world": 1, "temporary": True},
    ),
    (
        "12/34/org%2Fm%402%401%404d2%40bfloat16.kvcache.safetensors",
        {"layout": "lmcache-gds", "model": "org/m", "rank": 1, "world": 2, "block": "4d2"},
    ),
    (
        "12/34/org%2Fm%402%401%404d2%40bfloat16.kvcache.safetensors.metadata.tmp0123abcd",
        {"layout": "lmcache-gds", "block": "4d2", "temporary": True},
    ),
    ("12/34/m%402%401%404d2%40half.weka1", {"layout": "lmcache-gds", "block": "4d2"}),
    ("obj_17_ab12.bin", {"layout": "lmcache-nixl-pool", "shard": "17"}),
    (
        "/".join((*VLLM, f"{SHA256}.bin")),
        {
            "layout": "vllm-fs",
            "model": "meta-llama_Llama-3.1-8B",
            "rank": 3,
            "shard": "1",
            "block": SHA256,
        },
    ),
    (
        "/".join(("cache", *VLLM, f"{SHA256}.bin_{2**62}.tmp")),
        {"layout": "vllm-fs", "block": SHA256, "temporary": True},
    ),
    ("m_0123456789ab/.o_direct_probe_17.tmp", {"layout": "vllm-fs", "temporary": True}),
    (
        f"{MD5}/model.layers.0.self_attn.attn.safetensors",
        {"layout": "vllm-example", "block": MD5, "shard": "model.layers.0.self_attn.attn"},
    ),
    (f"{MD5}/.tmpAb12Cd", {"layout": "vllm-example", "block": MD5, "temporary": True}),
    ("swap.rank_3", {"layout": "vllm-disk", "rank": 3}),
    (
        f"{SHA256}_meta-llama-Llama-3.1-8B_2_8.bin",
        {
            "layout": "sglang-file",
            "model": "meta-llama-Llama-3.1-8B",
            "rank": 2,
            "world": 8,
            "block": SHA256,
        },
    ),
    (  # two pipeline stages of four ranks, context parallel
        f"{SHA256}.mamba_my_model_1_4_2_0_cp1_2.bin",
        {"layout": "sglang-file", "model": "my_model", "rank": 1, "world": 4, "shard": "mamba"},
    ),
    (  # latent attention: no ranks, but stages
        f"{SHA256}_deepseek-ai-DeepSeek-V3_2_1.bin",
        {"layout": "sglang-file", "model": "deepseek-ai-DeepSeek-V3", "rank": None},
    ),
    (
        f"{SHA256}.deepseek_v4_c4_indexer_scale_m_tp8_dcp1_2_page64.bin",
        {"model": "m", "rank": 1, "world": 8, "shard": "deepseek_v4_c4_indexer_scale"},
    ),
    (f".{UUID}.tmp", {"layout": "sglang-file", "block": "", "temporary": True}),
    (f"{SHA1}/_data.safetensors", {"layout": "vua", "block": SHA1, "shard": "data"}),
    (
        f"{SHA1}.tmp/_tokens.safetensors",
        {"layout": "vua", "block": SHA1, "shard": "tokens", "temporary": True},
    ),
    (f"{SHA1}.tmp/.tmpAb12Cd", {"layout": "vua", "block": SHA1, "shard": "", "temporary": True}),
    (
        f"3%{SHA1}/.tmpAb12Cd",
        {"layout": "vua-vllm", "rank": 3, "block": SHA1, "shard": "", "temporary": True},
    ),
    (
        f"3%{SHA1}/model.layers.0.self_attn.attn.safetensors",
        {"layout": "vua-vllm", "rank": 3, "shard": "model.layers.0.self_attn.attn"},
    ),
    (
        f"{32 * 'a'}/{32 * 'b'}",
        {"layout": "kvfs-prefix", "block": 32 * "b", "parent": 32 * "a", "shard": ""},
    ),
    (
        f"m/{32 * 'a'}/{32 * 'b'}.bin",
        {"layout": "kvfs-prefix", "shard": "bin", "temporary": False},
    ),
    (
        f"{32 * 'a'}/{32 * 'b'}.7.0x.tmp",
        {"layout": "kvfs-prefix", "shard": "7", "temporary": True},
    ),
    ("dynamo-kvbm-disk-cache-AbCdEf", {"layout": "dynamo-kvbm"}),
    ("1732000000000-17.bucket", {"layout": "mooncake-bucket"}),
    ("block_12_pool_0.bin", {"layout": "tensorrt-llm"}),
    ("hf3fs_vllm_data_file_2", {"layout": "hf3fs", "rank": 2}),
]

NOT_NAMES = (
    "",
    ".",
    "notes.txt",
    "notes.tmp",
    ".tmpAb12Cd",
    f"{SHA1}.tmp/.tmpAb12C",
    f"3%{SHA1}/tmpAb12Cd",
    "notes.meta",
    "slot7.bin",
    "model.safetensors",
    f"{MD5}/notes.txt",
    "m_0123456789ab/config.json",
    "model-00001-of-00004.safetensors",
    f"{SHA1}/model.safetensors",
    f"{VLLM[0]}/{SHA256}.bin",
    "m@x@0@ab@half.pt",
    "m@0x1@0@ab.data",
    f"{SHA256}.bin",
    "000000000000000B-000000000000000A.kv",
    "1-2.kv",
)


def parts(path: str) -> tuple[Directory, bytes]:
    *directory, name = path.encode().split(b"/")
    return tuple(directory), name


def said(path: str) -> Block:
    found = recognise(*parts(path))
    assert found is not None, path
    return found


@pytest.mark.parametrize(("path", "says"), NAMES, ids=[path for path, _ in NAMES])
def test_a_name_says(path: str, says: dict[str, Any]) -> None:
    found = said(path)
    assert {field: getattr(found, field) for field in says} == says
    assert found.temporary == says.get("temporary", False)
    assert 0 < found.key < 2**63
    assert bool(found.parent) == bool(found.parent_key)


def test_every_layout_is_among_the_examples() -> None:
    assert {said(path).layout for path, _ in NAMES} == set(LIVES)


@pytest.mark.parametrize("path", NOT_NAMES)
def test_other_names_say_nothing(path: str) -> None:
    assert recognise(*parts(path)) is None


ONE_GROUP = (
    ("m@2@0@ab@half.pt", "m@2@1@ab@half.pt", "m@2@1@ab@half@3.pt"),
    ("m@2@0@ab@half@t%1.data", "m@2@1@ab@half@t%1.data", "m@2@1@ab@half@t%1.tmp"),
    ("m@0x02000200@0@ab.data", "m@0x02010201@1@ab.data", "m@0x02010201@1@ab.tmp"),
    (
        "12/34/m%402%400%40ab%40half.kvcache.safetensors",
        "12/34/m%402%401%40ab%40half.kvcache.safetensors.metadata",
        "12/34/m%402%401%40ab%40half.kvcache.safetensors.tmp00000000",
    ),
    (
        "m_0123456789ab_r0/abc/de_g0/abcdef.bin",
        "m_0123456789ab_r1/abc/de_g1/abcdef.bin",
        "m_0123456789ab_r1/abc/de_g1/abcdef.bin_1.tmp",
    ),
    (f"{MD5}/a.safetensors", f"{MD5}/b.safetensors", f"{MD5}/.tmp000000"),
    (f"{SHA256}_m_0_2.bin", f"{SHA256}_m_1_2.bin", f"{SHA256}.mamba_m_1_2.bin"),
    (f"{SHA256}_m.bin", f"{SHA256}.mamba_m_0_8.bin", f"{SHA256}.mamba_m_7_8.bin"),
    (f"{SHA1}/_data.safetensors", f"{SHA1}/_tokens.safetensors", f"{SHA1}.tmp/_data.safetensors"),
    (f"0%{SHA1}/a.safetensors", f"0%{SHA1}/b.safetensors", f"1%{SHA1}/a.safetensors"),
    (f"{MD5}/{UUID}", f"{MD5}/{UUID}.0", f"{MD5}/{UUID}.bin"),
    ("1-2.bucket", "1-2.meta"),
    ("block_1_pool_0.bin", "block_1_pool_1.bin"),
)


@pytest.mark.parametrize("paths", ONE_GROUP, ids=[paths[0] for paths in ONE_GROUP])
def test_the_shards_of_a_block_are_one_group(paths: tuple[str, ...]) -> None:
    """And the block itself when it is renamed, so a key made for the temporary name stays right."""
    assert len({said(path).group for path in paths}) == 1
    assert len({said(path).key for path in paths}) == 1


def test_other_blocks_configurations_and_directories_are_other_groups() -> None:
    different = [
        "m@2@0@ab@half.pt",
        "m@2@0@ac@half.pt",
        "m@2@0@ab@bfloat16.pt",
        "m@4@0@ab@half.pt",
        "n@2@0@ab@half.pt",
        "m@2@0@ab@half@t%1.pt",
        "x/m@2@0@ab@half.pt",
        "m@2@0@ab@half.data",
        "m@0x02000200@0@ab.data",
        "m@0x02000200@0@ab@salt.data",
        "m_0123456789ab_r0/abc/de_g0/abcdef.bin",
        "m_0123456789ac_r0/abc/de_g0/abcdef.bin",
        "x/m_0123456789ab_r0/abc/de_g0/abcdef.bin",
        f"{SHA256}_m_0_2.bin",
        f"{SHA256}_n_0_2.bin",
        f".{UUID}.tmp",
        f"{SHA1}/_data.safetensors",
        f"x/{SHA1}/_data.safetensors",
    ]
    assert len({said(path).key for path in different}) == len(different)


def test_a_prefix_path_leads_to_its_parent() -> None:
    """This holds for any shard. A temporary file follows its parent, too, but is not the block."""
    root, first, second = map(prefix_paths.root_key, ("r", "1", "2"))
    paths = [
        prefix_paths.path(root, first),
        prefix_paths.path(first, second, "0"),
        prefix_paths.path(first, second, "1"),
        prefix_paths.path(first, second, "1") + ".z9.tmp",
    ]
    one, *shards, unfinished = (said(path) for path in paths)
    assert one.key == int.from_bytes(first[:8], "big") & (1 << 63) - 1
    assert {shard.parent_key for shard in (*shards, unfinished)} == {one.key}
    assert len({shard.key for shard in shards}) == 1
    assert unfinished.key not in {shard.key for shard in shards}
    assert recognise((), os.fsencode(first.hex())) is None


def test_a_link_of_vua_leads_to_its_parent() -> None:
    other = hashlib.sha1(b"parent", usedforsecurity=False).hexdigest()
    child = said(f"cache/{SHA1}/_data.safetensors").key
    parent = said(f"cache/{other}/_tokens.safetensors").key
    target = f"../{other}".encode()
    for directory in (SHA1, f"{SHA1}.tmp"):
        assert link((b"cache", directory.encode()), b"parent", target) == (child, parent)
    assert link((), b"parent", target) is None
    assert link((b"cache",), b"parent", target) is None
    assert link((SHA1.encode(),), b"child", target) is None
    assert link((SHA1.encode(),), b"parent", b"../elsewhere") is None


def test_unknown_name_is_a_group_of_its_own() -> None:
    keys = {key_of(ino, name) for ino in (1, 2, 2**62) for name in (b"a", b"b", b"\xff")}
    assert len(keys) == 9
    assert all(0 < key < 2**63 for key in keys)


@pytest.mark.parametrize("form", ["%d", "k%d", "blk%04d", "block-%012d", "%040d"])
def test_unknown_names_that_are_numbered_alike_have_their_own_keys(form: str) -> None:
    """Numbers of directories differ by few bits, and names as well. No two keys are equal."""
    names = [(form % number).encode() for number in range(100)]
    keys = {key_of(ino, name) for ino in range(2, 202) for name in names}
    assert len(keys) == 200 * len(names)


def test_files_of_connectors_with_an_index_are_never_dropped() -> None:
    """LMCache's local_disk raises KeyError for a file that went behind its back."""
    kept = {layout for layout, life in LIVES.items() if not life.droppable}
    assert kept == {
        "lmcache-local-disk",
        "lmcache-nixl-pool",
        "vllm-disk",
        "vllm-example",
        "vua-vllm",
        "dynamo-kvbm",
        "mooncake-bucket",
        "tensorrt-llm",
        "hf3fs",
    }
    assert all(life.why for life in LIVES.values())
