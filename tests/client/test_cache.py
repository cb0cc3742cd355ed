"""What PrefixCache promises, on a plain directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvfs.client import PrefixCache, Spec

TOKENS = list(range(100, 100 + 4 * 10 + 3))  # ten whole blocks, and three tokens
SPEC = Spec(
    model="m", revision="r", dtype="bfloat16", axes={"kv": 2, "token": 4, "head": 3, "dim": 8}
)


def blocks(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, *SPEC.shape), generator=generator).to(torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path, SPEC) as one:
        yield one


def test_nothing_is_cached_at_first(cache: PrefixCache) -> None:
    assert cache.match(TOKENS)[:2] == (0, 0)
    assert cache.load(TOKENS).blocks == 0
    assert cache.load(TOKENS, mode="mmap").blocks == 0


@pytest.mark.parametrize("mode", ["copy", "mmap"])
def test_what_was_saved_is_loaded(cache: PrefixCache, mode: str) -> None:
    given = blocks(10)
    assert cache.save(TOKENS, given) == 10
    match = cache.match(TOKENS)
    assert (match.blocks, match.tokens, len(match.keys)) == (10, 40, 10)
    loaded = cache.load(TOKENS, mode=mode)  # type: ignore[arg-type]
    assert loaded.blocks == 10
    assert all(torch.equal(a, b) for a, b in zip(loaded.tensors, given, strict=True))
    assert cache.stats.as_dict()["blocks_saved"] == 10


def test_into_given_memory(cache: PrefixCache) -> None:
    given = blocks(10)
    cache.save(TOKENS, given)
    out = torch.zeros((4, *SPEC.shape), dtype=SPEC.torch_dtype)
    loaded = cache.load(TOKENS, out)
    assert loaded.blocks == 4
    assert loaded.tensors is out
    assert torch.equal(out, given[:4])


def test_saved_step_by_step(cache: PrefixCache) -> None:
    given = blocks(10)
    for at in range(10):
        assert cache.save(TOKENS, given[at : at + 1], start=at) == at + 1
    assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), given)


def test_saved_and_loaded_by_keys(cache: PrefixCache) -> None:
    given, keys = blocks(10), SPEC.keys(TOKENS)
    assert cache.save_keys(keys[3], keys[4:6], given[4:6]) == 0
    assert cache.save_keys(SPEC.root, keys[:4], given[:4]) == 4
    assert cache.save_keys(keys[3], keys[4:6], given[4:6]) == 2
    assert cache.match_keys(keys[1], keys[2:]).blocks == 4
    loaded = cache.load_keys(keys[1], keys[2:])
    assert torch.equal(torch.stack(list(loaded.tensors)), given[2:6])


def test_blocks_without_those_before_are_not_saved(cache: PrefixCache) -> None:
    assert cache.save(TOKENS, blocks(3), start=5) == 0
    assert cache.match(TOKENS).blocks == 0
    assert cache.stats.blocks_unsaved == 3
