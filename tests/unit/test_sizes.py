"""Expected sizes of new files, by the earlier files of the same namespace and kind."""

import tracemalloc
from typing import Any

import pytest

from kvfs.core.capacity.sizes import REMEMBERED, ExpectedSizes, is_one_block, kind_of
from kvfs.layouts import LIVES, Kind, recognise
from tests.unit.test_layouts import NAMES

PT: Kind = ("", "pt")


def kind(path: str, directory: int = 1) -> Kind:
    *above, name = path.encode().split(b"/")
    return kind_of(recognise(tuple(above), name), directory, name)


def test_unknown_kind_has_no_expected_size() -> None:
    sizes = ExpectedSizes()
    assert sizes.expect(1, PT) is None
    sizes.learn(1, PT, 100)
    assert sizes.expect(1, PT) == 100
    assert sizes.expect(1, ("", "bin")) is None


def test_each_namespace_has_its_own_sizes() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, PT, 100)
    assert sizes.expect(2, PT) is None
    sizes.learn(2, PT, 5000)
    assert (sizes.expect(1, PT), sizes.expect(2, PT)) == (100, 5000)


def test_growth_is_believed_at_once_and_shrinking_slowly() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, PT, 1000)
    sizes.learn(1, PT, 9000)
    assert sizes.expect(1, PT) == 9000
    seen = []
    for _ in range(60):
        sizes.learn(1, PT, 1000)
        expected = sizes.expect(1, PT)
        assert expected is not None
        seen.append(expected)
    assert seen == sorted(seen, reverse=True)
    assert 1000 <= seen[-1] < 1100


@pytest.mark.parametrize(
    ("name", "extension"),
    [
        ("a.pt", "pt"),
        ("a.b.PT", "pt"),
        ("weights.bin.tmp12345", "bin"),
        ("weights.bin.12345.tmp", "bin"),
        ("weights.bin.temp", "bin"),
        ("weights.bin.part", "bin"),
        ("weights.bin.incomplete", "bin"),
        (".weights.bin.aB3xYz", "bin"),
        ("weights.bin.00001-of-00005", "bin"),
        ("a." + "x" * 200, "x" * 200),
        ("model.safetensors", "safetensors"),
    ],
)
def test_extension_is_the_kind_of_a_name_that_no_layout_knows(name: str, extension: str) -> None:
    assert kind(name) == ("", extension)
    assert kind(f"elsewhere/{name}", directory=2) == ("", extension)


@pytest.mark.parametrize(
    "name", ["a", "", ".", "a.", ".gitignore", ".tmpAb12Cd", "a.tmp7", "notes.v2", "a.\udcff"]
)
def test_directory_is_the_kind_of_a_name_without_extension(name: str) -> None:
    given = name.encode("utf-8", "surrogateescape")
    assert kind_of(None, 7, given) == ("", 7)


# A final name, and the temporary name before it.
PAIRS = {
    "lmcache-fs": ("m@2@1@abc@half.data", "m@2@1@def@half.tmp"),
    "lmcache-l2-fs": (
        f"m@0x01000100@0@{64 * 'a'}.data",
        f"m@0x01000100@0@{64 * 'b'}.tmp",
    ),
    "lmcache-gds": (
        "12/34/m%402%401%401a%40half.kvcache.safetensors",
        "56/78/m%402%401%402b%40half.kvcache.safetensors.tmp0123abcd",
    ),
    "vllm-fs": (
        "m_0123456789ab_r0/000/00_g0/0000000000001eef.bin",
        "m_0123456789ab_r1/111/11_g0/1111111111111eef.bin_17.tmp",
    ),
    "vllm-example": (f"{32 * 'a'}/model.layers.0.safetensors", f"{32 * 'b'}/.tmpAb12Cd"),
    "sglang-file": (f"{64 * 'a'}_m_2_8.bin", f".{32 * 'b'}.tmp"),
    "vua": (f"{40 * 'a'}/_data.safetensors", f"{40 * 'b'}.tmp/.tmpAb12Cd"),
    "vua-vllm": (f"3%{40 * 'a'}/layer.0.safetensors", f"0%{40 * 'b'}/.tmpAb12Cd"),
    "kvfs-prefix": (
        f"{32 * 'a'}/{32 * 'b'}.0",
        f"{32 * 'b'}/{32 * 'c'}.0.x7.tmp",
    ),
}


@pytest.mark.parametrize("layout", PAIRS)
def test_temporary_and_final_names_of_a_block_are_one_kind(layout: str) -> None:
    final, temporary = PAIRS[layout]
    *above, name = temporary.encode().split(b"/")
    block = recognise(tuple(above), name)
    assert block is not None
    assert (block.layout, block.temporary) == (layout, True)
    assert kind(final) == kind(temporary)
    assert kind(final)[0] == layout


def test_each_layout_with_temporary_names_has_a_pair() -> None:
    temporary = {facts["layout"] for _, facts in NAMES if facts.get("temporary")}
    assert temporary == set(PAIRS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("m@2@1@abc@half.pt", "large@2@1@abc@half.pt"),
        ("12/34/m%402%401%401a%40half.weka1", "12/34/m%402%401%401a%40half.weka1.metadata"),
        ("1-17.bucket", "1-17.meta"),
        ("block_1_pool_0.bin", "block_1_pool_1.bin"),
        (f"{64 * 'a'}_m_2_8.bin", "weights.bin"),
        (f"{32 * 'a'}/{32 * 'b'}.0", f"{32 * 'a'}/{32 * 'b'}.1"),
    ],
)
def test_files_of_different_sorts_are_different_kinds(one: str, other: str) -> None:
    assert kind(one) != kind(other)


@pytest.mark.parametrize(("path", "facts"), NAMES)
def test_each_name_of_a_layout_is_a_block_or_a_pool(path: str, facts: dict[str, Any]) -> None:
    *above, name = path.encode().split(b"/")
    block = recognise(tuple(above), name)
    assert block is not None
    assert block.kind[0] == block.layout == facts.get("layout", block.layout)
    pools = {"lmcache-nixl-pool", "vllm-disk", "dynamo-kvbm", "hf3fs"}
    assert {layout for layout, life in LIVES.items() if life.pool} == pools
    assert is_one_block(block) == (block.layout not in pools)


def test_name_that_no_layout_knows_is_no_block() -> None:
    assert not is_one_block(None)


def test_memory_is_bounded() -> None:
    sizes = ExpectedSizes()
    tracemalloc.start()
    try:
        for number in range(5 * REMEMBERED):
            sizes.learn(number + 1, ("vllm-fs", f"{number:0255}", "0"), 1 << 40)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sizes.expect(1, ("vllm-fs", f"{0:0255}", "0")) is None
    print(f"{taken} bytes")
    assert taken < 3 << 19
