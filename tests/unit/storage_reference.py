"""Lossy storage a second time, number by number, from docs/prefix-paths.md: without torch.

A block is a flat list in the order of its axes. Slow; what the tests hold `kvfs.client.storage`
against. Not for use.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import product

E4M3 = [
    (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) if code >> 3 else (code & 7) / 8 * 2.0**-6
    for code in range(127)  # the 128th is nan
]


def float32(value: float) -> float:
    """Rounded to it. Of one operation on two of them in double precision, that is right."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def float16(value: float) -> float:
    found: float = struct.unpack("<e", struct.pack("<e", value))[0]
    return found


def bfloat16(value: float) -> float:
    """Of a float32, whose upper half it is, to the nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found


ROUND: dict[str, Callable[[float], float]] = {
    "float32": float32,
    "float16": float16,
    "bfloat16": bfloat16,
}
SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def packed(value: float, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return struct.pack("<f", value)[2:]
    return struct.pack("<f" if dtype == "float32" else "<e", value)


def unpacked(data: bytes, dtype: str) -> float:
    if dtype == "bfloat16":
        data, dtype = b"\0\0" + data, "float32"
    found: float = struct.unpack("<f" if dtype == "float32" else "<e", data)[0]
    return found


def _places(axes: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Of each number, its scale's place and its own."""
    kept = [name for name in axes if name not in ("token", "dim")]
    for at, indices in enumerate(product(*map(range, axes.values()))):
        index = dict(zip(axes, indices, strict=True))
        scale = 0
        for name in kept:
            scale = scale * axes[name] + index[name]
        yield scale, at


def encode_fp8(block: list[float], axes: dict[str, int]) -> bytes:
    groups: dict[int, list[float]] = {}
    for scale, at in _places(axes):
        groups.setdefault(scale, []).append(abs(block[at]))
    exponents = []
    for group in range(len(groups)):
        exponent = -117
        while max(groups[group]) > math.ldexp(448, exponent):
            exponent += 1
        exponents.append(exponent)
    numbers = bytearray(len(block))
    for scale, at in _places(axes):
        value = math.ldexp(abs(block[at]), -exponents[scale])
        # To the nearest; of two as near, the one whose code is even.
        above = bisect_left(E4M3, value, hi=126)
        nearest = (max(above - 1, 0), above)
        code = min(nearest, key=lambda code: (abs(E4M3[code] - value), code & 1))
        numbers[at] = code | (128 if math.copysign(1, block[at]) < 0 else 0)
    return b"".join(struct.pack("<f", math.ldexp(1, one)) for one in exponents) + bytes(numbers)


def decode_fp8(stored: bytes, axes: dict[str, int], dtype: str) -> list[float]:
    begin = len(stored) - math.prod(axes.values())
    scales = struct.unpack(f"<{begin // 4}f", stored[:begin])
    found = []
    for scale, at in _places(axes):
        code = stored[begin + at]
        value = E4M3[code & 127] * scales[scale]
        found.append(ROUND[dtype](-value if code & 128 else value))
    return found


def encode_int4(block: list[float], group: int, dtype: str) -> bytes:
    scales, minima, pairs = [], [], []
    for begin in range(0, len(block), group):
        numbers = block[begin : begin + group]
        low, high = min(numbers), max(numbers)
        spread = float32(high - low)
        scale = ROUND[dtype](float32(spread / 15))
        if float32(scale * 15) < spread:
            bits = int.from_bytes(packed(scale, dtype), "little") + 1
            scale = unpacked(bits.to_bytes(SIZE[dtype], "little"), dtype)
        levels = [
            min(15, round(float32(float32(one - low) / scale))) if scale else 0 for one in numbers
        ]
        half = group // 2
        scales.append(packed(scale, dtype))
        minima.append(packed(low, dtype))
        pairs.append(bytes(levels[i] | levels[i + half] << 4 for i in range(half)))
    return b"".join(scales + minima + pairs)


def decode_int4(stored: bytes, count: int, group: int, dtype: str) -> list[float]:
    groups, size = count // group, SIZE[dtype]
    parts = [stored[at : at + size] for at in range(0, 2 * groups * size, size)]
    found = []
    for number in range(groups):
        scale = unpacked(parts[number], dtype)
        low = unpacked(parts[groups + number], dtype)
        begin = 2 * groups * size + number * group // 2
        pairs = stored[begin : begin + group // 2]
        levels = [pair & 15 for pair in pairs] + [pair >> 4 for pair in pairs]
        found += [ROUND[dtype](float32(float32(level * scale) + low)) for level in levels]
    return found
