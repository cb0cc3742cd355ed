"""Wrong arguments: TypeError and ValueError that name the argument, got and expected."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfs.client import PrefixCache, Spec
from tests.client.prompts import SPEC, TOKENS, blocks_of

GIVEN = blocks_of(TOKENS)
SAID = {"model": "m", "revision": "r", "dtype": "bfloat16", "axes": {"token": 4, "dim": 8}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path_factory.mktemp("cache"), SPEC) as one:
        one.save(TOKENS, GIVEN)
        yield one


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"dtype": "bf16"}, ValueError, "dtype='bf16': expected a torch.dtype or its name"),
        ({"dtype": "nn"}, ValueError, "dtype='nn': expected"),
        ({"dtype": 16}, TypeError, "dtype=16: expected"),
        ({"axes": {"dim": 8}}, ValueError, r"axes=\{'dim': 8\}: expected 'token'"),
        ({"axes": [4, 8]}, TypeError, r"axes=\[4, 8\]: expected"),
        ({"axes": {"token": 0}}, ValueError, r"axes\['token'\]=0: expected"),
        ({"axes": {"token": 4.0}}, ValueError, r"axes\['token'\]=4.0: expected"),
        ({"axes": {"token": True}}, ValueError, r"axes\['token'\]=True: expected"),
        ({"axes": {"token": 4, "a=1,b": 2}}, ValueError, "axes: the name 'a=1,b': expected"),
        ({"model": ""}, ValueError, "model=''"),
        ({"revision": None}, TypeError, "revision=None: expected str"),
        ({"shards": 0}, ValueError, "shards=0: expected at least 1"),
        ({"storage": "zip"}, ValueError, "storage='zip': expected"),
    ],
)
def test_spec(said: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Spec(**{**SAID, **said})


def test_spec_gives_shape_sizes_and_fingerprint() -> None:
    spec = Spec(
        model="m",
        revision="r",
        dtype=torch.bfloat16,
        axes={"kv": 2, "layer": 32, "token": 64, "head": 8, "dim": 128},
    )
    assert spec.shape == (2, 32, 64, 8, 128)
    assert (spec.block_tokens, spec.block_bytes, spec.stored_bytes) == (64, 8 << 20, 8 << 20)
    assert spec.fingerprint.layout == "kv=2,layer=32,token=64,head=8,dim=128"
    assert spec.fingerprint.dtype == "bfloat16"
    named = Spec(model="m", revision="r", dtype="torch.bfloat16", axes=dict(spec.axes))
    assert spec == named
    assert hash(spec) == hash(named)
    turned = Spec(
        model="m", revision="r", dtype="bfloat16", axes=dict(list(spec.axes.items())[::-1])
    )
    assert turned.root != spec.root, "the order of axes makes other bytes"


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.empty(3, 4), ValueError, r"out: expected torch.bfloat16 \(n, 2, 4, 3, 8\), got"),
        (
            torch.empty(SPEC.shape),
            ValueError,
            r"out: expected .*, got torch.float32 \(2, 4, 3, 8\)",
        ),
        (
            torch.empty(3, *SPEC.shape),
            ValueError,
            r"out\[0\]: expected torch.bfloat16 .* got torch.float32",
        ),
        ([GIVEN[0], 5], TypeError, r"out\[1\]: expected a tensor"),
        ("ten", TypeError, "out: expected a tensor, or a list of tensors, got <class 'str'>"),
        ([GIVEN[0, :1].expand(SPEC.shape)], ValueError, r"out\[0\]: expected memory of its own"),
        (
            GIVEN[:1].expand(3, *SPEC.shape),
            ValueError,
            r"out\[0\], out\[1\]: expected memory of its",
        ),
        ([GIVEN[0], GIVEN[1], GIVEN[0]], ValueError, r"out\[0\], out\[2\]: expected memory of its"),
        ([GIVEN[0].to("meta")], ValueError, r"out\[0\]: expected .* cpu or cuda, got .* meta"),
        ([GIVEN[0].to_sparse()], ValueError, r"out\[0\]: expected a dense tensor"),
    ],
)
def test_out(cache: PrefixCache, out: Any, error: type[Exception], message: str) -> None:  # noqa: ANN401
    for load in (cache.load, cache.submit_load):
        with pytest.raises(error, match=message):
            load(TOKENS, out)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"mode": "fast"}, ValueError, "mode='fast': expected 'copy' or 'mmap'"),
        ({"mode": "mmap", "out": GIVEN}, ValueError, "mode='mmap': expected out=None"),
        ({"blocks": -1}, ValueError, "blocks=-1: expected at least 0"),
        ({"blocks": 1.5}, TypeError, "blocks=1.5: expected an int"),
        ({"device": "gpu"}, ValueError, "device='gpu': expected 'cpu' or 'cuda'"),
        ({"device": "meta"}, ValueError, "device='meta': expected 'cpu' or 'cuda'"),
        ({"device": 1.5}, ValueError, "device=1.5: expected"),
    ],
)
def test_load(
    cache: PrefixCache, said: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cache.load(TOKENS, **said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(cache: PrefixCache) -> None:
    with pytest.raises(ValueError, match="device='cuda': expected 'cpu': there is no CUDA device"):
        cache.load(TOKENS, device="cuda")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2, "3", 4], TypeError, r"tokens\[2\]='3': expected an int"),
        ([1, 2, 3, -4], ValueError, r"tokens\[3\]=-4: expected an int from 0"),
        ([1, 2, 3, 2**31], ValueError, r"tokens\[3\]=2147483648"),
        (5, TypeError, "tokens=5: expected a sequence of ints"),
    ],
)
def test_tokens(
    cache: PrefixCache,
    tokens: Any,  # noqa: ANN401
    error: type[Exception],
    message: str,
) -> None:
    for call in (cache.match, cache.load, cache.prefetch, cache.pin):
        with pytest.raises(error, match=message):
            call(tokens)
    with pytest.raises(error, match=message):
        cache.save(tokens, GIVEN)


def test_tokens_as_tensors(cache: PrefixCache) -> None:
    assert cache.match(torch.tensor(TOKENS)).blocks == 10  # type: ignore[arg-type]


def test_save(cache: PrefixCache) -> None:
    with pytest.raises(ValueError, match=r"blocks: expected at most 3, .* from block 7 on, got 10"):
        cache.save(TOKENS, GIVEN, start=7)
    with pytest.raises(ValueError, match="start=-1: expected at least 0"):
        cache.save(TOKENS, GIVEN, start=-1)
    with pytest.raises(ValueError, match=r"blocks: expected torch.bfloat16 \(n, 2, 4, 3, 8\)"):
        cache.save(TOKENS, GIVEN[0])
    with pytest.raises(ValueError, match="tensors: expected 2, one for each key, got 10"):
        cache.save_keys(SPEC.root, SPEC.keys(TOKENS)[:2], GIVEN)


def test_keys(cache: PrefixCache) -> None:
    with pytest.raises(TypeError, match=r"keys\[0\]='a': expected 16 bytes"):
        cache.match_keys(SPEC.root, ["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="parent=61: expected 16 bytes, got 1"):
        cache.load_keys(b"a", SPEC.keys(TOKENS))


def test_opening(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"spec=None: expected a kvfs.client.Spec"):
        PrefixCache(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path='': expected the directory"):
        PrefixCache("", SPEC)
    with pytest.raises(TypeError, match="path=b'/tmp': expected text"):
        PrefixCache(b"/tmp", SPEC)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads=0: expected an int of at least 1"):
        PrefixCache(tmp_path, SPEC, threads=0)
    with pytest.raises(ValueError, match="shard=1: expected None"):
        PrefixCache(tmp_path, SPEC, shard=1)
    many = Spec(**SAID, shards=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shard='4': expected 0 to 3"):
        PrefixCache(tmp_path, many, shard="4")
