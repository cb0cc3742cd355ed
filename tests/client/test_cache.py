"""The promises of PrefixCache, on a plain directory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs import prefix
from kvfs.client import PrefixCache, Spec, SpecMismatchError
from tests.client.prompts import SPEC, TOKENS, blocks_of

GIVEN = blocks_of(TOKENS)
KEYS = SPEC.keys(TOKENS)


def path_of(cache: PrefixCache, at: int) -> Path:
    chain = [SPEC.root, *KEYS]
    return Path(cache.path, prefix.path(chain[at], chain[at + 1]))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path, SPEC) as one:
        yield one
        left = [path for path in tmp_path.rglob("*.tmp") if path.is_file()]
        assert left == []


def stacked(tensors: Any) -> torch.Tensor:  # noqa: ANN401
    return torch.stack(list(tensors))


def test_new_cache_matches_and_loads_no_block(cache: PrefixCache) -> None:
    assert cache.match(TOKENS)[:2] == (0, 0)
    assert cache.load(TOKENS).blocks == 0
    assert cache.load(TOKENS, mode="mmap").blocks == 0
    assert cache.prefetch(TOKENS).result() == 0


@pytest.mark.parametrize("mode", ["copy", "mmap"])
def test_saved_blocks_are_loaded(cache: PrefixCache, mode: Any) -> None:  # noqa: ANN401
    assert cache.save(TOKENS, GIVEN) == 10
    match = cache.match(TOKENS)
    assert (match.blocks, match.tokens, match.keys) == (10, 40, KEYS)
    loaded = cache.load(TOKENS, mode=mode)
    assert loaded.blocks == 10
    assert torch.equal(stacked(loaded.tensors), GIVEN)
    assert cache.stats.as_dict()["blocks_saved"] == 10
    assert cache.stats.as_dict()["blocks_loaded"] == 10


def test_a_file_is_the_bytes_of_the_tensor_and_no_more(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    for at in range(10):
        assert path_of(cache, at).read_bytes() == bytes(GIVEN[at].view(torch.uint8).flatten())


def test_prompts_share_their_common_blocks(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    other = [*TOKENS[:22], 7, *TOKENS[23:]]  # differs in the sixth block
    assert cache.match(other).blocks == 5
    assert cache.load(other).blocks == 5
    assert cache.save(other, blocks_of(other)) == 10
    assert cache.stats.blocks_present == 5
    assert torch.equal(stacked(cache.load(TOKENS).tensors), GIVEN)


def test_into_given_memory(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    out = torch.zeros((4, *SPEC.shape), dtype=SPEC.torch_dtype)
    loaded = cache.load(TOKENS, out)
    assert loaded.blocks == 4
    assert loaded.tensors is out
    assert torch.equal(out, GIVEN[:4])
    paged = [torch.zeros(SPEC.shape, dtype=SPEC.torch_dtype) for _ in range(12)]
    assert cache.load(TOKENS, paged).blocks == 10
    assert torch.equal(stacked(paged[:10]), GIVEN)
    assert not stacked(paged[10:]).any()
    assert cache.load(TOKENS, blocks=3).blocks == 3


def test_saved_step_by_step(cache: PrefixCache) -> None:
    for at in range(10):
        assert cache.save(TOKENS, GIVEN[at : at + 1], start=at) == at + 1
    assert torch.equal(stacked(cache.load(TOKENS).tensors), GIVEN)


def test_saved_and_loaded_by_keys(cache: PrefixCache) -> None:
    assert cache.save_keys(KEYS[3], KEYS[4:6], GIVEN[4:6]) == 0
    assert cache.save_keys(SPEC.root, KEYS[:4], GIVEN[:4]) == 4
    assert cache.save_keys(KEYS[3], KEYS[4:6], GIVEN[4:6]) == 2
    assert cache.match_keys(KEYS[1], KEYS[2:]).blocks == 4
    assert torch.equal(stacked(cache.load_keys(KEYS[1], KEYS[2:]).tensors), GIVEN[2:6])


def test_cached_blocks_are_not_written_again(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN[:6])
    before = [path_of(cache, at).stat().st_ino for at in range(6)]
    assert cache.save(TOKENS, torch.zeros_like(GIVEN)) == 10
    assert [path_of(cache, at).stat().st_ino for at in range(6)] == before
    assert cache.stats.blocks_present == 6
    assert torch.equal(stacked(cache.load(TOKENS, blocks=6).tensors), GIVEN[:6])


def test_blocks_without_those_before_are_not_saved(cache: PrefixCache) -> None:
    assert cache.save(TOKENS, GIVEN[5:8], start=5) == 0
    assert cache.match(TOKENS).blocks == 0
    assert cache.stats.blocks_unsaved == 3


def test_strided_blocks_are_saved_as_they_are(cache: PrefixCache) -> None:
    strided = GIVEN.transpose(1, 3).contiguous().transpose(1, 3)
    assert not strided[0].is_contiguous()
    assert cache.save(TOKENS, strided) == 10
    assert torch.equal(stacked(cache.load(TOKENS).tensors), GIVEN)


def test_load_ends_before_a_missing_block(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    path_of(cache, 6).unlink()
    for loaded in (cache.load(TOKENS, torch.empty_like(GIVEN)), cache.load(TOKENS, mode="mmap")):
        assert loaded.blocks == 6
        assert torch.equal(stacked(loaded.tensors)[:6], GIVEN[:6])
    assert cache.stats.blocks_absent == 2 * 4
    assert cache.stats.load_errors == 0
    assert cache.match(TOKENS).blocks == 6
    assert cache.save(TOKENS, GIVEN) == 10
    assert cache.load(TOKENS).blocks == 10


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_a_miss(cache: PrefixCache, change: int) -> None:
    cache.save(TOKENS, GIVEN)
    os.truncate(path_of(cache, 6), SPEC.stored_bytes + change)
    assert cache.load(TOKENS, torch.empty_like(GIVEN)).blocks == 6
    assert cache.load(TOKENS, mode="mmap").blocks == 6
    assert cache.match(TOKENS).blocks == 6, "no match ends behind a hole that was found"
    assert cache.save(TOKENS, GIVEN) == 10, "it is written anew"
    assert torch.equal(stacked(cache.load(TOKENS).tensors), GIVEN)


def test_fifo_or_directory_in_place_of_a_block_is_a_miss(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN[:3])
    os.mkfifo(path_of(cache, 3))
    path_of(cache, 4).parent.mkdir(exist_ok=True)
    path_of(cache, 4).mkdir()
    keys = SPEC.keys(TOKENS)
    for parent, key in ((keys[2], keys[3]), (keys[3], keys[4])):
        assert cache.load_keys(parent, [key], torch.empty_like(GIVEN)).blocks == 0
        assert cache.load_keys(parent, [key], mode="mmap").blocks == 0
    assert cache.stats.load_errors == 0
    path_of(cache, 1).rename(path_of(cache, 1).with_suffix(".away"))
    path_of(cache, 1).symlink_to(path_of(cache, 1).with_suffix(".away"))
    assert cache.load(TOKENS, torch.empty_like(GIVEN)).blocks == 1


def test_mapped_tensors_outlive_files_and_cache(tmp_path: Path) -> None:
    with PrefixCache(tmp_path, SPEC) as cache:
        cache.save(TOKENS, GIVEN)
        tensors = cache.load(TOKENS, mode="mmap").tensors
        for at in range(10):
            path_of(cache, at).unlink()
    assert torch.equal(stacked(tensors), GIVEN)


def test_write_into_a_mapped_tensor_leaves_the_cache_unchanged(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    first = cache.load(TOKENS, mode="mmap").tensors[0]
    first.zero_()
    assert torch.equal(cache.load(TOKENS, mode="mmap").tensors[0], GIVEN[0])
    assert not first.any()


def test_shards_are_files_of_one_block(tmp_path: Path) -> None:
    spec = Spec(model="m", revision="r", dtype="float32", axes={"token": 4, "dim": 8}, shards=2)
    given = blocks_of(TOKENS, spec)
    with (
        PrefixCache(tmp_path, spec) as every,
        PrefixCache(tmp_path, spec, shard=0) as left,
        PrefixCache(tmp_path, spec, shard="1") as right,
    ):
        assert left.save(TOKENS, given) == 10
        assert every.match(TOKENS).blocks == 0, "one of two is not all"
        assert right.save(TOKENS, -given[:7]) == 7
        assert every.match(TOKENS).blocks == 7
        assert torch.equal(stacked(right.load(TOKENS).tensors), -given[:7])
        assert left.load(TOKENS).blocks == 10
        with pytest.raises(ValueError, match="shard=None: expected 0 to 1"):
            every.load(TOKENS)


def test_another_spec_meets_nothing(tmp_path: Path, cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    other = Spec(model="m", revision="2", dtype="bfloat16", axes=SPEC.axes)
    with PrefixCache(tmp_path, other) as one:
        assert one.match(TOKENS).blocks == 0


def test_a_directory_of_another_spec_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama"
    PrefixCache(path, SPEC, create=True).close()
    PrefixCache(path, SPEC).close()
    other = Spec(model="other", revision="r", dtype="bfloat16", axes=SPEC.axes)
    with pytest.raises(SpecMismatchError) as refused:
        PrefixCache(path, other)
    assert str(SPEC.fingerprint) in str(refused.value)
    assert str(other.fingerprint) in str(refused.value)


def test_a_long_fingerprint_is_told_apart_by_its_root(tmp_path: Path) -> None:
    long = {"model": "m" * 3000, "dtype": "float32", "axes": SPEC.axes}
    PrefixCache(tmp_path / "a", Spec(revision="1", **long), create=True).close()  # type: ignore[arg-type]
    with pytest.raises(SpecMismatchError):
        PrefixCache(tmp_path / "a", Spec(revision="2", **long))  # type: ignore[arg-type]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create=True"):
        PrefixCache(tmp_path / "none", SPEC)
    (tmp_path / "file").touch()
    for create in (False, True):
        with pytest.raises(NotADirectoryError):
            PrefixCache(tmp_path / "file", SPEC, create=create)


def test_after_close(tmp_path: Path) -> None:
    cache = PrefixCache(tmp_path, SPEC)
    cache.close()
    cache.close()
    calls = (cache.match, cache.load, cache.prefetch, cache.pin, cache.submit_load)
    for call in calls:
        with pytest.raises(ValueError, match="is closed"):
            call(TOKENS)
    for save in (cache.save, cache.submit_save):
        with pytest.raises(ValueError, match="is closed"):
            save(TOKENS, GIVEN)


def test_after_a_fork(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN)
    child = os.fork()
    if not child:
        try:
            cache.match(TOKENS)
        except RuntimeError as error:
            os._exit(0 if "opened before a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_prefetch_opens_the_cached_blocks(cache: PrefixCache) -> None:
    cache.save(TOKENS, GIVEN[:8])
    assert cache.prefetch(TOKENS).result() == 8
    assert cache.stats.as_dict()["blocks_prefetched"] == 8
    assert cache.stats.blocks_loaded == 0


def test_futures(cache: PrefixCache) -> None:
    assert cache.submit_save(TOKENS, GIVEN).result() == 10
    waiting = [cache.submit_load(TOKENS, torch.empty_like(GIVEN)) for _ in range(20)]
    for one in waiting:
        loaded = one.result()
        assert loaded.blocks == 10
        assert torch.equal(stacked(loaded.tensors), GIVEN)


def test_a_copy_of_a_namespace_elsewhere_is_a_directory_like_others(tmp_path: Path) -> None:
    """The copy has the attributes, but its file system makes no directories by itself."""
    path = tmp_path / "copy"
    PrefixCache(path, SPEC, create=True).close()
    os.setxattr(path, "user.kvfs.prefix", b"on")
    with PrefixCache(path, SPEC) as cache:
        assert cache.save(TOKENS, GIVEN) == 10


@pytest.mark.parametrize("empty", [True, False])
def test_create_of_a_directory_that_is_there(tmp_path: Path, *, empty: bool) -> None:
    """An empty one becomes this spec's; a filled one may belong to several specs already."""
    if not empty:
        (tmp_path / "something").touch()
    PrefixCache(tmp_path, SPEC, create=True).close()
    other = Spec(model="other", revision="r", dtype="bfloat16", axes=SPEC.axes)
    if empty:
        with pytest.raises(SpecMismatchError):
            PrefixCache(tmp_path, other)
    else:
        PrefixCache(tmp_path, other, create=True).close()
