"""How numbers are stored: against a second implementation, and how far off what comes back is."""

import json
import math
import re
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvfs.client import storage as module
from kvfs.client.storage import DTYPES, BlockStorage, UnstorableError, storage
from tests.unit import storage_reference as reference
from tests.unit.fuzz import answers_in_time, fuzzed, spoiled

Wrong: TypeAlias = Any  # no type allows this
VECTORS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("prefix_vectors.json").read_text()
)["storage"]
PAGE = Path(__file__).parents[2] / "docs" / "prefix-paths.md"
LLAMA = {"kv": 2, "layer": 32, "token": 64, "head": 8, "dim": 128}
MLA = {"layer": 61, "token": 64, "dim": 576}
SMALL = {"kv": 2, "layer": 3, "token": 4, "head": 2, "dim": 8}
LOSSY = ("fp8", "int4:8", "int4:2")
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
# Where the axes are is up to the engine.
LAYOUTS = (
    SMALL,
    {"layer": 3, "head": 2, "token": 5, "dim": 8},
    {"token": 4, "layer": 2, "dim": 8},
    {"token": 3, "dim": 8},
    {"layer": 1, "token": 1, "dim": 8},
)
settings.register_profile("tensors", deadline=None, suppress_health_check=[HealthCheck.too_slow])
tensors = settings(settings.get_profile("tensors"), max_examples=60)


def numbers(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """All that can be stored, as the dtype has them; many small ones and many at the ends."""
    limit = torch.finfo(dtype).max / 2
    plain = st.floats(-limit, limit, width=32) | st.floats(-8, 8, width=32)
    ends = st.sampled_from([0.0, -0.0, limit, -limit, torch.finfo(dtype).smallest_normal, 1e-30])
    exact = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return (plain | ends | st.integers(-40, 40).map(lambda n: n * exact)).map(
        lambda one: torch.tensor(one, dtype=dtype).clamp(-limit, limit).item()
    )


@st.composite
def blocks(draw: st.DrawFn) -> tuple[dict[str, int], torch.Tensor]:
    dtype, axes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    some = draw(st.lists(numbers(dtype), min_size=1, max_size=24))
    seed = draw(st.integers(0, 1 << 31))
    order = torch.randint(
        len(some), tuple(axes.values()), generator=torch.Generator().manual_seed(seed)
    )
    return axes, torch.tensor(some, dtype=dtype)[order]


def random(axes: dict[str, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*axes.values(), generator=made).to(dtype)


def round_trip(made: BlockStorage, block: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(block, math.nan)
    made.decode(made.encode(block), out)
    return out


def group_of(name: str) -> int:
    return int(name.partition(":")[2])


# Sizes


@pytest.mark.parametrize(
    ("name", "axes", "size"),
    [
        ("raw", LLAMA, 8 << 20),
        ("fp8", LLAMA, (4 << 20) + 4 * 2 * 32 * 8),
        ("int4:32", LLAMA, (2 << 20) + 4 * (4 << 20) // 32),
        ("int4:64", LLAMA, (2 << 20) + 4 * (4 << 20) // 64),
        ("int4:128", LLAMA, (2 << 20) + 4 * (4 << 20) // 128),
        ("raw", MLA, 61 * 64 * 576 * 2),
        ("fp8", MLA, 61 * 64 * 576 + 4 * 61),
        ("int4:64", MLA, 61 * 64 * 576 // 2 + 4 * 61 * 64 * 9),
    ],
)
def test_stored_bytes_are_exact(name: str, axes: dict[str, int], size: int) -> None:
    made = storage(name, axes, torch.bfloat16)
    assert made.stored_bytes == size
    assert made.encode(torch.zeros(*axes.values(), dtype=torch.bfloat16)).shape == (size,)
    assert (made.name, made.raw) == (name, name == "raw")


# The format


@pytest.mark.parametrize("vector", VECTORS, ids=lambda one: f"{one['storage']} {one['dtype']}")
def test_vector_of_a_block(vector: dict[str, Any]) -> None:
    dtype = getattr(torch, vector["dtype"])
    made = storage(vector["storage"], vector["axes"], dtype)
    block = torch.tensor(vector["block"], dtype=dtype).view(made.shape)
    assert block.flatten().tolist() == vector["block"]
    assert bytes(made.encode(block)).hex() == vector["stored"]
    assert round_trip(made, block).flatten().tolist() == vector["decoded"]


def test_the_page_shows_a_vector_of_each() -> None:
    page = re.sub(r"\s", "", PAGE.read_text())
    for vector in VECTORS[:2]:
        assert vector["stored"] in page
        assert re.sub(r"\s", "", json.dumps(vector["block"])) in page
        assert re.sub(r"\s", "", json.dumps(vector["decoded"])) in page


@tensors
@given(blocks())
@example((SMALL, random(SMALL, torch.bfloat16)))
def test_fp8_is_the_same_in_both(given_: tuple[dict[str, int], torch.Tensor]) -> None:
    axes, block = given_
    made = storage("fp8", axes, block.dtype)
    stored = bytes(made.encode(block))
    assert stored == reference.encode_fp8(block.flatten().tolist(), axes)
    again = reference.decode_fp8(stored, axes, NAMES[block.dtype])
    assert round_trip(made, block).flatten().tolist() == again


@tensors
@given(blocks(), st.sampled_from([2, 4, 8]))
@example((SMALL, random(SMALL, torch.bfloat16)), 8)
def test_int4_is_the_same_in_both(given_: tuple[dict[str, int], torch.Tensor], group: int) -> None:
    axes, block = given_
    made = storage(f"int4:{group}", axes, block.dtype)
    stored = bytes(made.encode(block))
    name = NAMES[block.dtype]
    assert stored == reference.encode_int4(block.flatten().tolist(), group, name)
    again = reference.decode_int4(stored, block.numel(), group, name)
    assert round_trip(made, block).flatten().tolist() == again


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_codes_agree_with_torch(dtype: torch.dtype) -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    axes = {"token": 2, "dim": 127}
    made = storage("fp8", axes, dtype)
    scale = torch.tensor([0.25]).view(torch.uint8)
    out = torch.empty(2, 127, dtype=dtype)
    made.decode(torch.cat([scale, codes]), out)
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float32) * 0.25
    assert torch.equal(out.flatten(), wanted.to(dtype))


# How far off


@tensors
@given(blocks())
def test_fp8_is_off_by_a_sixteenth_at_most(given_: tuple[dict[str, int], torch.Tensor]) -> None:
    """Three bits of a mantissa: half of an eighth; of the smallest, half of 2**-9 of the scale."""
    axes, block = given_
    made = storage("fp8", axes, block.dtype)
    inner = [list(axes).index(name) for name in ("token", "dim")]
    exact = block.double()
    amax = exact.abs().amax(inner, keepdim=True)
    scale = torch.maximum(amax / 224, torch.tensor(2.0**-117, dtype=torch.float64))
    off = (round_trip(made, block).double() - exact).abs()
    tiny = torch.finfo(block.dtype).smallest_normal * torch.finfo(block.dtype).eps
    assert bool((off <= torch.maximum(exact.abs() / 16, scale / 1024) + tiny / 2).all())


@tensors
@given(blocks(), st.sampled_from([2, 4, 8]))
def test_int4_is_off_by_half_a_step_at_most(
    given_: tuple[dict[str, int], torch.Tensor], group: int
) -> None:
    axes, block = given_
    made = storage(f"int4:{group}", axes, block.dtype)
    groups = block.double().view(-1, group)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    info = torch.finfo(block.dtype)
    tiny = info.smallest_normal * info.eps
    # The scale is rounded up to the dtype, the number in between to float32, the result to dtype.
    step = (high - low) / 15 * (1 + info.eps) + tiny
    rounding = info.eps / 2 * torch.maximum(low.abs(), high.abs()) + tiny / 2
    off = (round_trip(made, block).double().view(-1, group) - groups).abs()
    assert bool((off <= step / 2 * (1 + 1e-6) + rounding * 1.01).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_error_of_normal_numbers_is_that_of_their_bits(name: str, dtype: torch.dtype) -> None:
    """2.6 % for three bits of a mantissa; for four bits a step's 1 / sqrt(12)."""
    block = random({**SMALL, "token": 64}, dtype)
    off = round_trip(storage(name, {**SMALL, "token": 64}, dtype), block).float() - block.float()
    found = float(off.norm() / block.float().norm())
    assert (0.02 < found < 0.03) if name == "fp8" else (0 < found < 0.07)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.0625])
def test_constant_block_is_restored_exactly(name: str, dtype: torch.dtype, value: float) -> None:
    block = torch.full(tuple(SMALL.values()), value, dtype=dtype)
    assert torch.equal(round_trip(storage(name, SMALL, dtype), block), block)


@tensors
@given(blocks())
def test_decoded_fp8_block_is_stored_again_without_loss(
    given_: tuple[dict[str, int], torch.Tensor],
) -> None:
    axes, block = given_
    made = storage("fp8", axes, block.dtype)
    once = round_trip(made, block / 2)  # a size rounded up beyond the limit would be refused
    assert torch.equal(round_trip(made, once), once)


def test_large_values_of_one_head_leave_other_heads_exact() -> None:
    block = random(SMALL, torch.bfloat16)
    made = storage("fp8", SMALL, torch.bfloat16)
    before = round_trip(made, block)
    block[:, :, :, 1] *= 10_000
    after = round_trip(made, block)
    assert torch.equal(before[:, :, :, 0], after[:, :, :, 0])


# The same bytes in all cases


@pytest.mark.parametrize("name", ["raw", *LOSSY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_chunks_make_no_difference(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for axes in LAYOUTS:
        block, made = random(axes, dtype), storage(name, axes, dtype)
        stored = made.encode(block)
        wide = torch.stack([block, block], -1)[..., 0]
        turned = block.transpose(0, -1).contiguous().transpose(0, -1)
        for other in (wide, turned):
            assert torch.equal(made.encode(other), stored)
        target = torch.full((*made.shape, 2), math.nan, dtype=dtype)
        made.decode(stored, target[..., 1])
        assert bool(target[..., 0].isnan().all())
        for chunk in (1, 8, 1 << 30):
            monkeypatch.setattr(module, "CHUNK", chunk)
            assert torch.equal(made.encode(block), stored)
            assert torch.equal(round_trip(made, block), target[..., 1])


@pytest.mark.parametrize("name", ["raw", *LOSSY])
def test_buffers_are_used_and_the_block_is_left_alone(name: str) -> None:
    for dtype in DTYPES:
        block, made = random(SMALL, dtype), storage(name, SMALL, dtype)
        before, room = block.clone(), torch.zeros(made.stored_bytes + 8, dtype=torch.uint8)
        out = made.encode(block, room[4:-4] if name != "raw" else room[: made.stored_bytes])
        assert out.data_ptr() == room.data_ptr() + (4 if name != "raw" else 0)
        assert torch.equal(block, before)
        stored = out.clone()
        made.decode(out, torch.empty_like(block))
        assert torch.equal(out, stored)
        assert not room[-4:].any()


def test_raw_is_the_memory() -> None:
    block = random(SMALL, torch.bfloat16)
    assert bytes(storage("raw", SMALL, block.dtype).encode(block)) == bytes(
        block.view(torch.uint8).flatten()
    )
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64):
        assert storage("raw", SMALL, dtype).stored_bytes == 384 * dtype.itemsize


# Refusals


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "beyond", "-beyond"])
def test_numbers_that_would_not_come_back_are_refused(
    name: str, dtype: torch.dtype, value: float | str
) -> None:
    half = torch.finfo(dtype).max / 2
    block = random(SMALL, dtype)
    made = storage(name, SMALL, dtype)
    for at in (0, 200, -1):
        spoiled_ = block.clone()
        if isinstance(value, str):
            sign = -1 if value.startswith("-") else 1
            spoiled_.view(-1)[at] = sign * half
            made.encode(spoiled_)
            spoiled_.view(-1)[at] = sign * half * 1.01
        else:
            spoiled_.view(-1)[at] = value
        with pytest.raises(UnstorableError, match=rf"storage={name}: numbers from .* finite ones"):
            made.encode(spoiled_)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_malformed_scales_are_refused(name: str, dtype: torch.dtype) -> None:
    made = storage(name, SMALL, dtype)
    stored, out = made.encode(random(SMALL, dtype)), torch.empty(*SMALL.values(), dtype=dtype)
    kind = torch.float32 if name == "fp8" else dtype
    wrong = [math.nan, math.inf, -math.inf, -1.0]
    for value in wrong + ([0.0, 3.0, 2.0**-118, 2.0**120, 0.3] if name == "fp8" else []):
        spoiled_ = stored.clone()
        spoiled_[: kind.itemsize] = torch.tensor([value], dtype=kind).view(torch.uint8)
        with pytest.raises(ValueError, match="stored has a scale that encode never writes"):
            made.decode(spoiled_, out)


@pytest.mark.parametrize("name", ["raw", *LOSSY])
def test_other_tensors_are_refused(name: str) -> None:
    block, made = random(SMALL, torch.bfloat16), storage(name, SMALL, torch.bfloat16)
    stored = made.encode(block)
    size = made.stored_bytes
    wrong: Wrong
    for wrong, error, message in (
        (block.tolist(), TypeError, "block=list: expected a tensor"),
        (block.float(), TypeError, "block of torch.float32: expected torch.bfloat16"),
        (block[0], ValueError, r"block of shape \[3, 4, 2, 8\]: expected \[2, 3, 4, 2, 8\]"),
    ):
        with pytest.raises(error, match=message):
            made.encode(wrong)
        with pytest.raises(error, match=message.replace("block", "out")):
            made.decode(stored, wrong)
    for wrong, error, message in (
        (stored[1:], ValueError, rf"of shape \[{size - 1}\]: expected \[{size}\]"),
        (stored.view(torch.int8), TypeError, "of torch.int8: expected torch.uint8"),
        (torch.stack([stored, stored], 1)[:, 0], ValueError, "expected contiguous memory"),
        (torch.cat([stored, stored])[1 : size + 1], ValueError, "multiple of 4 bytes"),
        (stored.to("meta"), ValueError, "is on meta: expected cpu"),
    ):
        with pytest.raises(error, match=message):
            made.decode(wrong, torch.empty_like(block))
        with pytest.raises(error, match=message):
            made.encode(block, wrong)


@pytest.mark.parametrize(
    ("name", "axes", "dtype", "error", "message"),
    [
        (None, SMALL, torch.bfloat16, TypeError, "storage=None: expected 'raw', 'fp8'"),
        *(
            (
                name,
                SMALL,
                torch.bfloat16,
                ValueError,
                re.escape(f"storage={name!r}: expected 'raw'"),
            )
            for name in (
                "",
                "FP8",
                "fp8:8",
                "int4",
                "int4:",
                "int4:-8",
                "int4:0",
                "int4:08",
                "int8:8",
            )
        ),
        ("int4:٨", SMALL, torch.bfloat16, ValueError, "expected 'raw'"),
        ("int4:16", SMALL, torch.bfloat16, ValueError, "an even number that divides dim=8"),
        ("int4:1", SMALL, torch.bfloat16, ValueError, "an even number that divides dim=8"),
        ("int4:3", {"token": 1, "dim": 9}, torch.bfloat16, ValueError, "even number"),
        (
            "int4:2",
            {"dim": 8, "token": 4},
            torch.bfloat16,
            ValueError,
            "expected 'dim' as the last",
        ),
        ("fp8", {"token": 4, "hidden": 8}, torch.bfloat16, ValueError, "lack dim"),
        ("fp8", {"dim": 4}, torch.bfloat16, ValueError, "lack token"),
        ("fp8", SMALL, torch.float64, ValueError, "expected one of bfloat16, float16, float32, or"),
        ("int4:8", SMALL, torch.int8, ValueError, "expected one of bfloat16"),
    ],
)
def test_other_specs_are_refused(
    name: Wrong, axes: dict[str, int], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        storage(name, axes, dtype)


@fuzzed
@given(spoiled(["raw", "fp8", "int4:64", "int4:8"]))
def test_any_text_is_a_storage_or_refused(text: str) -> None:
    try:
        made = storage(text, LLAMA, torch.float16)
    except ValueError:
        return
    assert made.name == text
    assert text in ("raw", "fp8") or LLAMA["dim"] % group_of(text) == 0


def test_no_text_takes_for_ever() -> None:
    answers_in_time(lambda text: storage(text, LLAMA, torch.float16), ValueError)
    answers_in_time(lambda text: storage(f"int4:{text}", LLAMA, torch.float16), ValueError)
