"""PrefixCache on a real mount: the effect of evictions on it, and on mapped tensors."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvfs import prefix
from kvfs.client import PrefixCache, Spec, SpecMismatchError
from tests.client.prompts import SPEC, TOKENS, block_of, blocks_of
from tests.conftest import Mount
from tests.harness import Mounted, wait_for

GIVEN = blocks_of(TOKENS)
LARGE = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 1 << 16})  # 1 MiB


@pytest.mark.parametrize("storage", ["raw", "fp8"])
def test_saved_and_loaded(kv: Mounted, storage: str) -> None:
    spec = Spec(model="m", revision="r", dtype="bfloat16", axes=SPEC.axes, storage=storage)
    with PrefixCache(kv.path / "llama", spec, create=True) as cache:
        for at in range(0, 10, 5):
            assert cache.save(TOKENS, GIVEN[at : at + 5], start=at) == at + 5
        match = cache.match(TOKENS)
        assert match.blocks == 10
        assert match.bytes is not None
        assert sum(match.bytes) == 10 * spec.stored_bytes
        loaded = torch.stack(list(cache.load(TOKENS).tensors))
        assert loaded.shape == GIVEN.shape
        if storage == "raw":
            assert torch.equal(loaded, GIVEN)
            mapped = cache.load(TOKENS, mode="mmap")
            assert torch.equal(torch.stack(list(mapped.tensors)), GIVEN)
        assert cache.prefetch(TOKENS).result() == 10
    assert not list((kv.path / "llama").glob("*/*.tmp"))


def test_namespace_has_the_fingerprint_as_attribute(kv: Mounted) -> None:
    path = kv.path / "llama"
    PrefixCache(path, SPEC, create=True).close()
    assert os.getxattr(path, "user.kvfs.fingerprint").decode() == str(SPEC.fingerprint)
    with pytest.raises(SpecMismatchError) as refused:
        PrefixCache(path, LARGE)
    assert str(SPEC.fingerprint) in str(refused.value)
    assert str(LARGE.fingerprint) in str(refused.value)


def test_many_may_create_it_at_once(kv: Mounted) -> None:
    """All ranks begin at once: none finds a namespace without settings, or is refused."""
    crowd = 8
    for number in range(5):
        path, begin = kv.path / f"model{number}", threading.Barrier(crowd)

        def create(path: Path = path, begin: threading.Barrier = begin) -> bool:
            begin.wait()
            with PrefixCache(path, SPEC, create=True) as cache:
                cache.save(TOKENS, GIVEN)
            return os.getxattr(path, "user.kvfs.prefix") == b"on"

        with ThreadPoolExecutor(crowd) as pool:
            created = [pool.submit(create) for _ in range(crowd)]
        assert all(one.result() for one in created)


def healed(cache: PrefixCache, left: int) -> None:
    """Check that blocks missing at a load are no match any more, and can be saved again."""
    assert cache.load(TOKENS).blocks == left
    assert cache.match(TOKENS).blocks == left
    assert cache.save(TOKENS, GIVEN) == 10
    assert torch.equal(torch.stack(list(cache.load(TOKENS).tensors)), GIVEN)


def test_a_block_that_was_moved_by_hand_is_saved_again(kv: Mounted) -> None:
    path, keys = kv.path / "llama", SPEC.keys(TOKENS)
    with PrefixCache(path, SPEC, create=True) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
        (path / prefix.path(keys[4], keys[5])).rename(path / prefix.path(SPEC.root, keys[5]))
        healed(cache, 5)
        (path / keys[2].hex()).rename(path / ("9" * 32))
        healed(cache, 3)


def test_another_namespace_of_the_name_is_asked(kv: Mounted) -> None:
    path = kv.path / "llama"
    with PrefixCache(path, SPEC, create=True) as cache:
        assert cache.save(TOKENS, GIVEN) == 10
        path.rename(kv.path / "old")
        PrefixCache(path, SPEC, create=True).close()
        healed(cache, 0)
    with PrefixCache(path, SPEC) as other:
        assert other.match(TOKENS).blocks == 10


def test_the_mount_itself_is_no_namespace(kv: Mounted) -> None:
    for create in (False, True):
        with pytest.raises(ValueError, match="expected a namespace, a directory of this mount"):
            PrefixCache(kv.path, SPEC, create=create)
    assert list(kv.path.iterdir()) == []


def test_both_ways_to_match_say_the_same(kv: Mounted) -> None:
    """The mount's one answer, and stats; the descriptor survives the daemon."""
    path = kv.path / "llama"
    spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 8}, shards=2)
    with (
        PrefixCache(path, spec, shard=0, create=True) as left,
        PrefixCache(path, spec, shard=1) as right,
    ):
        given = blocks_of(TOKENS, spec)
        assert left.save(TOKENS, given) == 10
        for saved in (0, 4, 10):
            right.save(TOKENS, given[:saved])
            asked = left.match(TOKENS)
            assert asked.bytes is not None
            assert sum(asked.bytes) == saved * 2 * spec.stored_bytes
            keys, shards = spec.keys(TOKENS), spec.shard_names
            assert left._bisection.ask(spec.root, keys, shards).blocks == asked.blocks == saved
        kv.kill_daemon()
        assert left.match(TOKENS).blocks == 10
        assert left.match(TOKENS).bytes is not None


def test_a_chain_is_saved_without_a_directory_being_made(
    kv: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = os.mkdir

    def counted(path: str) -> None:
        made.append(path)
        real(path)

    monkeypatch.setattr(os, "mkdir", counted)
    with PrefixCache(kv.path / "llama", SPEC, create=True) as cache:
        keys = SPEC.keys(TOKENS)
        assert cache.save_keys(SPEC.root, keys[:5], GIVEN[:5]) == 5
        assert cache.save_keys(keys[4], keys[5:], GIVEN[5:]) == 5
        assert made == [cache.path, f"{cache.path}/{SPEC.root.hex()}"]
        assert cache.save_keys(b"x" * 16, keys[:1], GIVEN[:1]) == 0, "nothing is made for no block"
    assert {path.name for path in Path(cache.path).iterdir()} == {
        SPEC.root.hex(),
        *(key.hex() for key in keys),
    }


def test_pinned_blocks(kv: Mounted) -> None:
    with PrefixCache(kv.path / "llama", SPEC, create=True) as cache:
        cache.save(TOKENS, GIVEN[:4])
        files = [path for path in Path(cache.path).glob("*/*") if path.is_file()]
        for on, word in ((True, b"on"), (False, b"off")):
            assert cache.pin(TOKENS, on=on) == 4
            assert {os.getxattr(path, "user.kvfs.pin") for path in files} <= {word}


def test_mapped_tensors_outlive_their_dropped_objects(mount: Mount) -> None:
    kv = mount("ram=32M")
    with PrefixCache(kv.path / "llama", LARGE, create=True) as cache:
        given = blocks_of(TOKENS, LARGE)
        assert cache.save(TOKENS, given) == 10
        mapped = cache.load(TOKENS, mode="mmap")
        assert mapped.blocks == 10
        for number in range(1, 9):
            other = [number, *TOKENS]
            cache.save(other, blocks_of(other, LARGE))
        assert torch.equal(torch.stack(list(mapped.tensors)), given)


WORKER = """
import sys
from tests.client.test_mount import work
work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
PROMPTS = 12
STEPS = 60


def prompt(number: int) -> list[int]:
    """One prompt of a family: each begins like some others."""
    return [number % 2] * 8 + [number % 4] * 16 + [number] * 24


def work(path: str, seed: int, steps: int) -> None:
    """Save and load at random; each loaded block must belong to this very prompt."""
    rng = random.Random(seed)
    loaded = 0
    with PrefixCache(path, LARGE, threads=2) as cache:
        for _ in range(steps):
            tokens = prompt(rng.randrange(PROMPTS))
            keys = LARGE.keys(tokens)
            if rng.random() < 0.4:
                start = rng.choice([0, 0, cache.match(tokens).blocks])
                given = [block_of(key, LARGE) for key in keys[start:]]
                assert 0 <= cache.save(tokens, given, start=start) <= len(keys)
                continue
            if rng.random() < 0.5:
                found = cache.load(tokens, mode="mmap")
            else:
                out = torch.full((len(keys), *LARGE.shape), float("nan"))
                found = cache.load(tokens, out)
            loaded += found.blocks
            for key, block in zip(keys[: found.blocks], found.tensors, strict=False):
                assert torch.equal(block, block_of(key, LARGE)), f"seed {seed}: {key.hex()}"
        stats = cache.stats.as_dict()
    print(f"seed {seed}: {loaded} blocks loaded, {stats}")
    assert loaded, f"seed {seed}: nothing was ever cached"


@pytest.mark.slow
def test_loaded_blocks_are_a_prefix_while_kvfs_evicts(mount: Mount) -> None:
    """80 MiB of blocks of 1 MiB in a tier of 24 MiB, three processes."""
    kv = mount("ram=24M")
    kv.allow_log("is cut off")  # what the readers have mapped may leave a writer no room
    path = kv.path / "llama"
    PrefixCache(path, LARGE, create=True).close()
    first = int.from_bytes(os.urandom(2), "big")
    print(f"seeds {first} to {first + 2}")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, path, str(first + number), str(STEPS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(3)
    ]
    said = [worker.communicate(timeout=240)[0] for worker in workers]
    print(*said)
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert kv.counter("dropped_evicted") > 0, "nothing was dropped: this shows nothing"

    def prefixes_only() -> bool:
        """Whether each block has the one before it; those without are deleted soon after."""
        left = {found.relative_to(path) for found in path.glob("*/*")}
        named = {prefix.parse(found.name) for found in left}
        there = {name.key.hex() for name in named if name and not name.temporary}
        return {found.parent.name for found in left} - {LARGE.root.hex()} <= there

    wait_for(prefixes_only, "no block is without the one before it")
