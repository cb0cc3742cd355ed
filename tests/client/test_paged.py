"""Pages of an engine's memory: every layout that it may have, and parts of blocks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvfs.client import PrefixCache, Spec
from kvfs.connectors.paged import Load, Mover, PagedMemory, Save

PAGE, PAGES, LAYERS, HEADS, NUMBERS = 8, 12, 3, 2, 6
BLOCK = 16  # tokens: two pages
TOKENS = list(range(5 * BLOCK))
# How the axes (pages, heads, tokens, numbers) are in memory, and how many parts a page has.
LAYOUTS = {"heads first": ((0, 1, 2, 3), 1), "tokens first": ((0, 2, 1, 3), 1)}
LAYOUTS["in parts"] = ((0, 1, 2, 3), 4)


def memory_of(layout: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Layers in which every page has bytes of its own."""
    order, parts = LAYOUTS[layout]
    shape = (PAGES * parts, HEADS, PAGE // parts, NUMBERS)
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(LAYERS):
        inner = torch.randint(
            0,
            255,
            (*(shape[axis] for axis in order[:-1]), NUMBERS * dtype.itemsize),
            dtype=torch.uint8,
            generator=generator,
        ).view(dtype)
        made.append(inner.permute(*torch.argsort(torch.tensor(order)).tolist()))
        assert made[-1].shape == shape
    return made


def bytes_of(layers: list[torch.Tensor], pages: list[int]) -> torch.Tensor:
    """The bytes of these pages' tokens, in order."""
    found = []
    for layer in layers:
        cut = layer.reshape(PAGES, -1, *layer.shape[1:])[pages].permute(0, 1, 3, 2, 4)
        found.append(cut.reshape(len(pages) * PAGE, HEADS, NUMBERS))
    return torch.stack(found).contiguous().view(torch.uint8)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    axes = {"layer": LAYERS, "token": BLOCK, "head": HEADS, "content": NUMBERS}
    spec = Spec(model="m", revision="", dtype="bfloat16", axes=axes)
    with PrefixCache(tmp_path / "ns", spec, create=True) as opened:
        yield opened


def loaded(mover: Mover, load: Load) -> set[int]:
    mover.load(load)
    mover._loads[load.request][1].result()
    names, missing = mover.loaded()
    assert names == {load.request}
    assert mover.loaded() == (set(), set())
    return missing


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("read", LAYOUTS)
def test_a_block_is_the_same_in_every_layout(cache: PrefixCache, written: str, read: str) -> None:
    source, target = memory_of(written), [layer.clone() for layer in memory_of(read)]
    keys = cache.spec.keys(TOKENS)[:2]
    there = [7, 2, 9, 4]
    mover = Mover(cache, PagedMemory(source, PAGES), staging_bytes=1 << 20)
    mover.save(Save(cache.spec.root, keys, there))
    wanted = bytes_of(source, there)
    for layer in source:
        layer.zero_()  # what is saved was read before the caller went on
    mover.close()
    assert cache.stats.blocks_saved == 2

    here = [1, 11, 3]
    others = [page for page in range(PAGES) if page not in here]
    before = bytes_of(target, others)
    mover = Mover(cache, PagedMemory(target, PAGES), staging_bytes=1 << 20)
    # The first page of the first block is there already.
    assert loaded(mover, Load("r", cache.spec.root, keys, here, 1)) == set()
    mover.close()
    assert torch.equal(bytes_of(target, here), wanted[:, PAGE:])
    assert torch.equal(bytes_of(target, others), before)


def test_pages_of_missing_blocks_are_named_and_unchanged(cache: PrefixCache) -> None:
    layers = memory_of("tokens first")
    keys = cache.spec.keys(TOKENS)[:4]
    mover = Mover(cache, PagedMemory(layers, PAGES), staging_bytes=1 << 20)
    mover.save(Save(cache.spec.root, keys[:2], [0, 1, 2, 3]))
    mover._saver.submit(int).result()
    here = [4, 5, 6, 7, 8, 9, 10]
    before = bytes_of(layers, here[3:])
    assert loaded(mover, Load("r", cache.spec.root, keys, here, 1)) == set(here[3:])
    assert torch.equal(bytes_of(layers, here[:3]), bytes_of(layers, [1, 2, 3]))
    assert torch.equal(bytes_of(layers, here[3:]), before)
    mover.close()


def test_pages_without_staging_room_are_not_saved(cache: PrefixCache) -> None:
    keys = cache.spec.keys(TOKENS)[:3]
    memory = PagedMemory(memory_of("tokens first"), PAGES)
    mover = Mover(cache, memory, staging_bytes=2 * cache.spec.block_bytes)
    mover.save(Save(cache.spec.root, keys, [0, 1, 2, 3, 4, 5]))
    mover._saver.submit(int).result()
    assert mover.unsaved == 1
    assert cache.match_keys(cache.spec.root, keys).blocks == 2
    mover.save(Save(keys[1], keys[2:], [4, 5]))  # there is room again
    mover.close()
    assert cache.match_keys(cache.spec.root, keys).blocks == 3
    other = Mover(cache, memory, staging_bytes=1 << 20, saves=False)
    other.save(Save(cache.spec.root, cache.spec.keys(TOKENS[::-1])[:1], [0, 1]))
    other.close()
    assert cache.stats.blocks_saved == 3


def test_numbers_of_one_byte(tmp_path: Path) -> None:
    layers = memory_of("heads first", torch.float8_e4m3fn)
    memory = PagedMemory(layers, PAGES)
    spec = Spec(model="m", revision="", dtype=memory.dtype, axes=memory.axes(BLOCK))
    wanted = bytes_of(layers, [0, 1])
    with PrefixCache(tmp_path / "ns", spec, create=True) as cache:
        mover = Mover(cache, memory, staging_bytes=1 << 20)
        keys = spec.keys(TOKENS)[:1]
        mover.save(Save(spec.root, keys, [0, 1]))
        mover._saver.submit(int).result()
        assert loaded(mover, Load("r", spec.root, keys, [8, 9], 0)) == set()
        mover.close()
    assert torch.equal(bytes_of(layers, [8, 9]), wanted)


def test_memory_without_whole_pages_is_refused(cache: PrefixCache) -> None:
    layers = memory_of("heads first")
    with pytest.raises(ValueError, match="expected one shape, dtype and device"):
        PagedMemory([layers[0], layers[1].float()], PAGES)
    with pytest.raises(ValueError, match=r"expected \(7 pages \* parts, heads, tokens, numbers\)"):
        PagedMemory(layers, 7)
    with pytest.raises(ValueError, match="staging_bytes=1: expected at least a block"):
        Mover(cache, PagedMemory(layers, PAGES), staging_bytes=1)
