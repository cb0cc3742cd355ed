"""How many bytes an element has, and whether compressing pays, told from a sample.

Contract: reads SAMPLE bytes in pieces spread evenly over the object and compresses them. A sample
knows more than a name or a header: safetensors tell a dtype, .bin and .pt files of raw pages none,
and scales or packed nibbles may be in either. Not for the whole object, which `files` looks at.
"""

from collections.abc import Callable

from kvfs.compression.frames import pack

PAYS = 1.1  # times smaller; below it costs all of the work and spares less than a tenth of the room
SAMPLE = 512 << 10  # bytes; in less, four planes share zstd's blocks of 128 KiB, and fp32 looks bad
_PIECES = 16
_SIZES = (2, 1, 4)  # bf16 first: where two are equal, it is taken


def sampled(read: Callable[[int, int], bytes], size: int, known: int | None) -> int | None:
    """Return the element size that compresses best, or None if no one pays.

    read: offset and length to bytes. known: the only size to be tried. Raises what `read` does.
    """
    sample = _sample(read, size)
    stored = {each: len(pack(sample, each)) for each in ([known] if known else _SIZES)}
    best = min(stored, key=stored.__getitem__)
    return best if stored[best] * PAYS <= len(sample) else None


def _sample(read: Callable[[int, int], bytes], size: int) -> bytes:
    if size <= SAMPLE:
        return read(0, size)
    piece = SAMPLE // _PIECES
    apart = (size - piece) // (_PIECES - 1) & ~7  # every piece begins with a whole element
    return b"".join(read(number * apart, piece) for number in range(_PIECES))
