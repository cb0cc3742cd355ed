"""Keys of prefixes a second time, from docs/prefix-paths.md and the specification of XXH3 alone.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, its names and its steps, in numbers
of Python; of seed 0 and the secret that it calls the default. Slow, and without xxhash: what the
tests hold `kvfs.prefix` against. Not for use.
"""

import struct

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
BLOCK = 1024  # bytes after which accumulators are scrambled: 16 stripes of 64


def digest(data: bytes) -> bytes:
    """XXH3-128 in its canonical order: the higher half first, most significant byte first."""
    size = len(data)
    if size <= 16:
        low, high = _small(data)
    elif size <= 240:
        low, high = _medium(data)
    else:
        low, high = _large(data)
    return struct.pack(">QQ", high, low)


def root(fingerprint: str) -> bytes:
    return digest(fingerprint.encode("utf-8"))


def keys(start: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    found = [start]
    for block in range(len(tokens) // block_tokens):
        data = bytearray(found[-1])
        for token in tokens[block * block_tokens : (block + 1) * block_tokens]:
            data += token.to_bytes(4, "little", signed=True)
        found.append(digest(bytes(data)))
    return found[1:]


def _words(data: bytes, start: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", data, start)


def _swapped(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _halves(value: int) -> tuple[int, int]:
    return value & M64, value >> 64


def _folded(value: int) -> int:
    low, high = _halves(value)
    return low ^ high


def _avalanche(x: int) -> int:
    x ^= x >> 37
    x = x * PRIME_MX1 & M64
    return x ^ x >> 32


def _avalanche_xxh64(x: int) -> int:
    x ^= x >> 33
    x = x * PRIME64_2 & M64
    x ^= x >> 29
    x = x * PRIME64_3 & M64
    return x ^ x >> 32


def _small(data: bytes) -> tuple[int, int]:
    size = len(data)
    if size == 0:
        a, b, c, d = _words(SECRET, 64, 4)
        return _avalanche_xxh64(a ^ b), _avalanche_xxh64(c ^ d)
    if size <= 3:
        e, f, g, h = struct.unpack_from("<4I", SECRET)
        combined = data[-1] | size << 8 | data[0] << 16 | data[size >> 1] << 24
        turned = _swapped(combined, 4)
        turned = (turned << 13 | turned >> 19) & M32
        return _avalanche_xxh64(e ^ f ^ combined), _avalanche_xxh64(g ^ h ^ turned)
    if size <= 8:
        a, b = _words(SECRET, 16, 2)
        (first,), (last,) = struct.unpack("<I", data[:4]), struct.unpack("<I", data[-4:])
        value = a ^ b ^ (first | last << 32)
        low, high = _halves(value * (PRIME64_1 + (size << 2) & M64))
        high = high + (low << 1) & M64
        low ^= high >> 3
        low ^= low >> 35
        low = low * PRIME_MX2 & M64
        return low ^ low >> 28, _avalanche(high)
    a, b, c, d = _words(SECRET, 32, 4)
    (first,), (last,) = _words(data, 0, 1), _words(data, size - 8, 1)
    one, two = a ^ b ^ first ^ last, c ^ d ^ last
    low, high = _halves(one * PRIME64_1)
    low = low + (size - 1 << 54) & M64
    high = high + ((two >> 32) << 32) + (two & M32) * PRIME32_2 & M64
    low ^= _swapped(high, 8)
    low, more = _halves(low * PRIME64_2)
    high = more + high * PRIME64_2 & M64
    return _avalanche(low), _avalanche(high)


def _mix(data: bytes, start: int, secret: int, seed: int) -> int:
    (a, b), (c, d) = _words(data, start, 2), _words(SECRET, secret, 2)
    return _folded((a ^ (c + seed & M64)) * (b ^ (d - seed & M64)))


def _medium(data: bytes) -> tuple[int, int]:
    size = len(data)
    acc = [size * PRIME64_1 & M64, 0]

    def mix_two(one: int, two: int, secret: int, seed: int = 0) -> None:
        acc[0] = acc[0] + _mix(data, one, secret, seed) & M64
        acc[1] = acc[1] + _mix(data, two, secret + 16, seed) & M64
        acc[0] ^= sum(_words(data, two, 2)) & M64
        acc[1] ^= sum(_words(data, one, 2)) & M64

    if size <= 128:
        for i in reversed(range((size - 1 >> 5) + 1)):
            mix_two(i * 16, size - i * 16 - 16, i * 32)
    else:
        for i in range(4):
            mix_two(i * 32, i * 32 + 16, i * 32)
        acc[:] = map(_avalanche, acc)
        for i in range(4, size >> 5):
            mix_two(i * 32, i * 32 + 16, (i - 4) * 32 + 3)
        mix_two(size - 16, size - 32, 103)
    high = acc[0] * PRIME64_1 + acc[1] * PRIME64_4 + size * PRIME64_2 & M64
    return _avalanche(sum(acc) & M64), -_avalanche(high) & M64


def _large(data: bytes) -> tuple[int, int]:
    size = len(data)
    acc = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]

    def accumulate(start: int, secret: int) -> None:
        pairs = zip(_words(data, start, 8), _words(SECRET, secret, 8), strict=True)
        for i, (lane, word) in enumerate(pairs):
            value = lane ^ word
            acc[i ^ 1] = acc[i ^ 1] + lane & M64
            acc[i] = acc[i] + (value & M32) * (value >> 32) & M64

    def merge(start: int, secret: int) -> int:
        words = _words(SECRET, secret, 8)
        for i in range(0, 8, 2):
            start += _folded((acc[i] ^ words[i]) * (acc[i + 1] ^ words[i + 1]))
        return _avalanche(start & M64)

    last = (size - 1) // BLOCK * BLOCK  # where the last block begins, whole or not
    for block in range(0, last, BLOCK):
        for n in range(16):
            accumulate(block + 64 * n, 8 * n)
        for i, word in enumerate(_words(SECRET, len(SECRET) - 64, 8)):
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ word) * PRIME32_1 & M64
    for n in range((size - last - 1) // 64):
        accumulate(last + 64 * n, 8 * n)
    accumulate(size - 64, len(SECRET) - 71)
    low = merge(size * PRIME64_1 & M64, 11)
    return low, merge(~(size * PRIME64_2) & M64, len(SECRET) - 75)
