"""Tensors in several pieces of memory: an engine's own, of layers, or of keys and values."""

from pathlib import Path

import pytest
import torch

from kvfs.client import PrefixCache, Spec, files, memory

SPEC = Spec(model="m", revision="", dtype="int16", axes={"kv": 2, "layer": 3, "token": 4, "dim": 5})
# Pages in pools as engines have them, and in how many runs their bytes are.
POOLS = {
    "layer first": (torch.zeros(2, 3, 40, 5, dtype=torch.int16), 6),
    "page first": (torch.zeros(2, 10, 3, 4, 5, dtype=torch.int16), 2),
    "one piece": (torch.zeros(10, 2, 3, 4, 5, dtype=torch.int16), 1),
    "wider rows": (torch.zeros(10, 2, 3, 4, 7, dtype=torch.int16), 24),
    "dim first": (torch.zeros(5, 2, 3, 40, dtype=torch.int16), 120),
}


def page(pool: str, number: int) -> torch.Tensor:
    whole = POOLS[pool][0]
    if pool == "layer first":
        return whole[:, :, 4 * number : 4 * number + 4]
    if pool == "page first":
        return whole[:, number]
    if pool == "dim first":
        return whole[..., 4 * number : 4 * number + 4].permute(1, 2, 3, 0)
    return whole[number, ..., :5]


@pytest.mark.parametrize("pool", POOLS)
def test_pages_of_a_pool_are_saved_and_loaded_where_they_are(pool: str, tmp_path: Path) -> None:
    numbers, tokens = torch.randperm(10, generator=torch.Generator().manual_seed(3)), range(40)
    given = torch.arange(10 * 120, dtype=torch.int16).view(10, *SPEC.shape)
    for number, block in zip(numbers, given, strict=True):
        page(pool, int(number)).copy_(block)
    pages = [page(pool, int(number)) for number in numbers]
    assert {len(memory.view(one)) for one in pages} == {POOLS[pool][1]}
    with PrefixCache(tmp_path, SPEC) as cache:
        assert cache.save(list(tokens), pages) == 10
        assert torch.equal(torch.stack(list(cache.load(list(tokens)).tensors)), given)
        POOLS[pool][0].zero_()
        assert cache.load(list(tokens), out=pages).blocks == 10
    assert torch.equal(torch.stack(pages), given)
    beside = POOLS[pool][0].sum() - given.sum()
    assert beside == 0, "what is beside the pages was written to"


def test_more_runs_than_a_system_call_takes(tmp_path: Path) -> None:
    wide = torch.arange(3000 * 4, dtype=torch.int16).view(3000, 4)[:, :2]
    runs = memory.view(wide)
    assert len(runs) == 3000
    path = files.write_temporary(str(tmp_path), "x", runs)
    assert Path(path).read_bytes() == wide.contiguous().numpy().tobytes()
    into = torch.zeros(3000, 4, dtype=torch.int16)
    with open(path, "rb") as file:
        files.read_into(file.fileno(), memory.view(into[:, :2]))
    assert torch.equal(into[:, :2], wide)
    assert not into[:, 2:].any()
