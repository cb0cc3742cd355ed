"""Memory of this process: the bytes of tensors, and new ones that are quick to fill."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_HUGE = 2 << 20
Runs = list[memoryview]


def view(tensor: torch.Tensor) -> Runs:
    """Return the bytes of a CPU tensor, which must outlive them, in its order, without a copy.

    A contiguous tensor has one run, others as few runs as their strides allow. So an engine's own
    memory is read and written in place, even if its layers, or keys and values, are apart.
    """
    size, axis = tensor.element_size(), tensor.dim()
    run = size
    while axis and (tensor.shape[axis - 1] == 1 or tensor.stride(axis - 1) * size == run):
        axis -= 1
        run *= tensor.shape[axis]
    starts = [tensor.data_ptr()]
    for length, stride in zip(tensor.shape[:axis], tensor.stride()[:axis], strict=True):
        starts = [start + at * stride * size for start in starts for at in range(length)]
    return [_run(start, run) for start in starts]


def views(blocks: torch.Tensor | Sequence[torch.Tensor], most: int) -> list[Runs]:
    """Return the `view` of each block, of at most `most` blocks."""
    if not isinstance(blocks, torch.Tensor) or not blocks.is_contiguous():
        return [view(block) for block in blocks[:most]]
    start, size = blocks.data_ptr(), blocks[:1].nbytes
    return [[_run(start + at * size, size)] for at in range(min(most, len(blocks)))]


def _run(start: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(start)).cast("B")


@contextmanager
def content(block: torch.Tensor) -> Iterator[Runs]:
    """Give the bytes of a CPU tensor while the caller needs them."""
    yield view(block)


def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor, in huge pages where the system has some.

    Filling 4 KiB pages took 8 times as long: 512 MiB of them fault 131,072 times.
    """
    tensor = torch.empty(shape, dtype=dtype)
    begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -begin % mmap.PAGESIZE
    if size >= 2 * _HUGE:  # the call is advice: its result does not matter
        _LIBC.madvise(begin + first, size - first, mmap.MADV_HUGEPAGE)
    return tensor
