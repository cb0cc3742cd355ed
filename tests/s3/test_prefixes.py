"""Prefixes that another node has computed come from the shared bucket."""

import subprocess

import torch

from kvfs.client import PrefixCache, Spec
from tests.harness import KVFS, wait_for
from tests.s3.test_mounted import all_uploaded
from tests.s3.test_two_nodes import Two, two

__all__ = ["two"]

SPEC = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1024})
TOKENS = list(range(4 * 10))
GIVEN = torch.arange(10 * 4 * 1024, dtype=torch.float32).view(10, 4, 1024)


def test_blocks_saved_by_one_node_are_loaded_by_another(two: Two) -> None:
    a, b = two()
    with (
        PrefixCache(a.path / "m", SPEC, create=True) as ours,
        PrefixCache(b.path / "m", SPEC, create=True) as theirs,
    ):
        assert theirs.match(TOKENS).blocks == 0
        assert ours.save(TOKENS[:24], GIVEN[:6]) == 6
        subprocess.run([*KVFS, "flush", str(a.path), "--wait"], check=True)
        wait_for(lambda: theirs.match(TOKENS).blocks == 6, "all of it is found")
        found = theirs.match(TOKENS)
        assert found.bytes is not None
        assert sum(found.bytes) == 6 * SPEC.stored_bytes
        loaded = theirs.load(TOKENS)
        assert loaded.blocks == 6
        assert torch.equal(torch.stack(list(loaded.tensors)), GIVEN[:6])

        assert theirs.save(TOKENS, GIVEN[6:], start=6) == 10
        all_uploaded(b)
        wait_for(lambda: ours.match(TOKENS).blocks == 10, "what continues it is found")
        assert torch.equal(torch.stack(list(ours.load(TOKENS).tensors)), GIVEN)
