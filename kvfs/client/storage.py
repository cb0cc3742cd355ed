"""Storage of a block's numbers in its file: unchanged, or in fewer bits.

    storage(name, axes, dtype) -> BlockStorage name: "raw", "fp8" or "int4:G"
    .stored_bytes                             exactly, of every block

    .encode(block, out=None) -> uint8 tensor [stored_bytes]
    .decode(stored, out) -> None              out: a tensor of the block's shape and dtype

Contract: pure and deterministic; the same block gives the same bytes on every device.
docs/prefix-paths.md specifies the written bytes for other readers. A block with a number that would
not come back finite is refused (`UnstorableError`), never stored as another. Scales that `encode`
cannot have written are refused (ValueError), never decoded. The work takes no more memory than the
target and a few chunks of 1 MiB on a CPU. It runs on the tensors' device. Not for the content of a
fingerprint, nor for files. Little-endian machines only.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import ClassVar

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK = 1 << 18  # numbers of one step: 1 MiB of float32, which fits a core's cache
_EXPONENT = 23  # where float32 has its exponent
_MANTISSA = (1 << _EXPONENT) - 1

assert sys.byteorder == "little", "kvfs.client.storage is for little-endian machines"


class UnstorableError(ValueError):
    """A number of the block would not come back as stored: inf, nan, or too large."""


class BlockStorage(ABC):
    """The storage of blocks of one shape and dtype. `name` is the fingerprint's word for it.

    - shape: lengths of the axes in their order.
    - stored_bytes: of one block.
    - raw: the file has the block's memory unchanged. A caller that can use that memory itself needs
      neither encode nor decode.
    """

    raw: ClassVar[bool] = False

    def __init__(self, name: str, axes: Mapping[str, int], dtype: torch.dtype) -> None:
        self.name = name
        self.shape = torch.Size(axes.values())
        self.dtype = dtype
        self.numbers = prod(self.shape)
        self.stored_bytes = self._stored_bytes(dict(axes))

    def encode(self, block: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the stored bytes of a block.

        - block: [*shape] of `dtype`, any strides.
        - out: uint8 [stored_bytes], contiguous, on the block's device, beginning at a multiple of 4
          bytes; made if it is None.

        Raises TypeError or ValueError for another tensor, UnstorableError for its numbers; `out` is
        undefined then.
        """
        _check("block", block, self.shape, self.dtype)
        if out is None:
            out = torch.empty(self.stored_bytes, dtype=torch.uint8, device=block.device)
        self._check_stored("out", out, block.device)
        self._encode(block, out)
        return out

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with the block. See `encode` for both.

        Raises TypeError or ValueError, the latter also for bytes that are no block; `out` is
        undefined then.
        """
        _check("out", out, self.shape, self.dtype)
        self._check_stored("stored", stored, out.device)
        self._decode(stored, out)

    @abstractmethod
    def _stored_bytes(self, axes: dict[str, int]) -> int: ...

    @abstractmethod
    def _encode(self, block: torch.Tensor, out: torch.Tensor) -> None: ...

    @abstractmethod
    def _decode(self, stored: torch.Tensor, out: torch.Tensor) -> None: ...

    def _check_stored(self, name: str, given: torch.Tensor, device: torch.device) -> None:
        _check(name, given, torch.Size([self.stored_bytes]), torch.uint8)
        if given.device != device:
            raise ValueError(f"{name} is on {given.device}: expected {device}, as for the block")
        if not given.is_contiguous() or given.data_ptr() % 4:
            raise ValueError(f"{name}: expected contiguous memory at a multiple of 4 bytes")

    def _chunks(self, outer: int, device: torch.device) -> Iterator[tuple[int, ...]]:
        """Yield indices of small parts, along those `outer` axes that no group spans."""
        depth = 0
        while depth < outer and prod(self.shape[depth:]) > CHUNK and device.type == "cpu":
            depth += 1
        return product(*map(range, self.shape[:depth]))

    def _refuse_beyond(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Raises UnstorableError for a number beyond half the range, or nan.

        Half the range is left so that no rounding leads out of it; nan compares as false.
        """
        limit = torch.finfo(self.dtype).max / 2
        if not bool(((low >= -limit) & (high <= limit)).all()):
            least, most = float(low.min()), float(high.max())
            raise UnstorableError(
                f"storage={self.name}: numbers from {least:g} to {most:g} in the block: expected "
                f"finite ones, from {-limit:g} to {limit:g}"
            )


class Raw(BlockStorage):
    """Stores the numbers unchanged."""

    raw: ClassVar[bool] = True

    def _stored_bytes(self, axes: dict[str, int]) -> int:
        return prod(axes.values()) * self.dtype.itemsize

    def _encode(self, block: torch.Tensor, out: torch.Tensor) -> None:
        out.view(self.dtype).view(self.shape).copy_(block)

    def _decode(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(stored.view(self.dtype).view(self.shape))

    def _check_stored(self, name: str, given: torch.Tensor, device: torch.device) -> None:
        super()._check_stored(name, given, device)
        if given.data_ptr() % self.dtype.itemsize:
            raise ValueError(
                f"{name}: expected memory at a multiple of {self.dtype.itemsize} bytes"
            )


class Fp8(BlockStorage):
    """Stores float8_e4m3fn, with one scale for all tokens and dims of each (kv, layer, head).

    A scale is a power of two, so that multiplying by it is exact. A decoded number differs by at
    most 2**-4 of itself, or by 2**-10 of its scale, whichever is more. A scale is less than amax /
    224.
    """

    # 448, the largest number, is 1.75 * 2**8; exponents and mantissas are those of float32's bits.
    _LARGEST_EXPONENT: ClassVar[int] = 8
    _LARGEST_MANTISSA: ClassVar[int] = 0x600000
    _LEAST: ClassVar[int] = 10  # of scales: 2**-117, for which all products are normal
    _MOST: ClassVar[int] = 246  # 2**119, for which none is inf

    def _stored_bytes(self, axes: dict[str, int]) -> int:
        names = list(axes)
        self._inner = [names.index(name) for name in ("token", "dim")]
        kept = [1 if at in self._inner else length for at, length in enumerate(axes.values())]
        self._kept = torch.Size(kept)
        self._scales = 4 * prod(kept)
        return self._scales + self.numbers

    def _parts(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales as bits of float32, and the numbers."""
        scales, numbers = stored[: self._scales], stored[self._scales :]
        return scales.view(torch.int32).view(self._kept), numbers.view(self.shape)

    def _encode(self, block: torch.Tensor, out: torch.Tensor) -> None:
        scales, numbers = self._parts(out)
        for at in self._chunks(min(self._inner), block.device):
            x = block[at].to(torch.float32)
            amax = x.abs().amax([axis - len(at) for axis in self._inner], keepdim=True)
            self._refuse_beyond(-amax, amax)
            bits = amax.view(torch.int32)
            # The least power of two that, times 448, gives amax or more.
            more = (bits & _MANTISSA) > self._LARGEST_MANTISSA
            exponent = (bits >> _EXPONENT) - self._LARGEST_EXPONENT + more.int()
            exponent.clamp_(min=self._LEAST)
            scales[at] = exponent << _EXPONENT
            inverse = ((254 - exponent) << _EXPONENT).view(torch.float32)
            numbers[at] = (x * inverse).to(torch.float8_e4m3fn).view(torch.uint8)

    def _decode(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        scales, numbers = self._parts(stored)
        exponents = scales >> _EXPONENT
        right = (exponents >= self._LEAST) & (exponents <= self._MOST)
        right &= (scales & _MANTISSA) == 0
        if not bool(right.all()):
            raise ValueError(f"storage={self.name}: stored has a scale that encode never writes")
        # The same bits, with one more of an exponent, are float16 of 2**-8 the value. The processor
        # converts that; torch converts e4m3 one by one, which takes five times as long.
        factors = ((exponents + 8) << _EXPONENT).view(torch.float32)
        for at in self._chunks(min(self._inner), out.device):
            bits = numbers[at].view(torch.int8).to(torch.int16)
            bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
            x = bits.view(torch.float16).to(torch.float32)
            out[at].copy_(x.mul_(factors[at]))


class Int4(BlockStorage):
    """Stores four bits each, in groups of `group` along the last axis, with scale and minimum.

    A decoded number differs by at most half of its group's scale, (max - min) / 15, and the
    rounding to dtype. Scale and minimum are of `dtype` themselves.
    """

    LEVELS: ClassVar[int] = 15

    def __init__(self, name: str, axes: Mapping[str, int], dtype: torch.dtype, group: int) -> None:
        self.group = group
        super().__init__(name, axes, dtype)

    def _stored_bytes(self, axes: dict[str, int]) -> int:
        *outer, last = axes.values()
        self._groups = torch.Size([*outer, last // self.group])
        self._scales = prod(self._groups) * self.dtype.itemsize
        return 2 * self._scales + self.numbers // 2

    def _parts(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scales and minima [*groups, 1], and pairs of numbers [*groups, group / 2]."""
        each, size = (*self._groups, 1), self._scales
        scales, minima, pairs = stored[:size], stored[size : 2 * size], stored[2 * size :]
        return (
            scales.view(self.dtype).view(each),
            minima.view(self.dtype).view(each),
            pairs.view(*self._groups, self.group // 2),
        )

    def _encode(self, block: torch.Tensor, out: torch.Tensor) -> None:
        scales, minima, pairs = self._parts(out)
        for at in self._chunks(len(self.shape) - 1, block.device):
            x = block[at].to(torch.float32)
            x = x.reshape(*x.shape[:-1], -1, self.group)
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            self._refuse_beyond(low, high)
            spread = high - low
            scale = (spread / self.LEVELS).to(self.dtype)
            # Rounded up where needed, because the largest would else be beyond level 15.
            short = scale.to(torch.float32) * self.LEVELS < spread
            scale = _next(scale, short)
            scales[at], minima[at] = scale, low.to(self.dtype)
            divisor = scale.to(torch.float32)
            divisor.masked_fill_(divisor == 0, 1)
            levels = (x - low).div_(divisor).round_().clamp_(max=self.LEVELS).to(torch.uint8)
            half = self.group // 2
            pairs[at] = levels[..., :half] | levels[..., half:] << 4

    def _decode(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        scales, minima, pairs = self._parts(stored)
        right = scales.isfinite() & (scales >= 0) & minima.isfinite()
        if not bool(right.all()):
            raise ValueError(f"storage={self.name}: stored has a scale that encode never writes")
        half = self.group // 2
        for at in self._chunks(len(self.shape) - 1, out.device):
            packed = pairs[at]
            x = packed.new_empty((*packed.shape[:-1], self.group), dtype=torch.float32)
            x[..., :half] = packed & 15
            x[..., half:] = packed >> 4
            x.mul_(scales[at].to(torch.float32)).add_(minima[at].to(torch.float32))
            target = out[at]
            target.copy_(x.view(target.shape))


def storage(name: str, axes: Mapping[str, int], dtype: torch.dtype) -> BlockStorage:
    """Return the storage of this name.

    - name: "raw", "fp8", or "int4:G" with groups of G numbers.
    - axes: names and lengths of one file's axes in their order. Storage fp8 needs "token" and
      "dim". For int4 the last axis is "dim", and G, an even number, divides its length.
    - dtype: of the block; for fp8 and int4 one of DTYPES.

    Raises TypeError and ValueError.
    """
    if not isinstance(name, str):
        raise TypeError(f"storage={name!r}: expected 'raw', 'fp8' or 'int4:G', as 'int4:64'")
    if name == "raw":
        return Raw(name, axes, dtype)
    kind, colon, text = name.partition(":")
    if name != "fp8" and not (kind == "int4" and re.fullmatch("[1-9][0-9]{0,8}", text)):
        raise ValueError(f"storage={name!r}: expected 'raw', 'fp8' or 'int4:G', as 'int4:64'")
    if dtype not in DTYPES:
        known = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise ValueError(f"storage={name!r} of dtype={dtype}: expected one of {known}, or 'raw'")
    if not colon:
        if missing := {"token", "dim"} - set(axes):
            raise ValueError(f"storage='fp8': axes={dict(axes)} lack {', '.join(sorted(missing))}")
        return Fp8(name, axes, dtype)
    if list(axes)[-1:] != ["dim"]:
        raise ValueError(f"storage={name!r}: axes={dict(axes)}: expected 'dim' as the last one")
    group = int(text)
    if group % 2 or axes["dim"] % group:
        raise ValueError(
            f"storage={name!r}: expected groups of an even number that divides dim={axes['dim']}"
        )
    return Int4(name, axes, dtype, group)


def _next(positive: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the next larger number of the dtype where `where` is true: one more, in bits."""
    bits = torch.int32 if positive.element_size() == torch.int32.itemsize else torch.int16
    return (positive.view(bits) + where.to(bits)).view(positive.dtype)


def _check(name: str, given: object, shape: torch.Size, dtype: torch.dtype) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}={type(given).__name__}: expected a tensor")
    if given.dtype != dtype:
        raise TypeError(f"{name} of {given.dtype}: expected {dtype}")
    if given.shape != shape:
        raise ValueError(f"{name} of shape {list(given.shape)}: expected {list(shape)}")
