"""One block's file: opened, read, mapped, written.

Contract: a file is the block's bytes and nothing else, so a file of another size is no block. A
function opens nothing twice, reads nothing partly, and leaves nothing behind: before it raises, it
closes and unlinks. Every function raises OSError; the calls that move bytes release the GIL. Not
for names (`kvfs.prefix`), for the order of a chain, or for the meaning of a failure.

A mapping is private and copied on write. A process that writes into a mapped tensor changes its own
memory, never the cache, and does not die. An unlinked file lives as long as a mapping of it. A
process that reads a mapping of a truncated file dies (SIGBUS). kvfs never truncates a file that has
its name; on other file systems, cleaners must unlink files instead of truncating them.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_READ, _WRITE = 1, 2  # PROT_, asm-generic/mman-common.h
_AT_ONCE = 1024  # runs that one preadv(2) or pwritev(2) takes: IOV_MAX, limits.h
_SHARED, _PRIVATE, _NORESERVE = 1, 2, 0x4000  # MAP_


def open_block(path: str) -> int:
    """Return a descriptor; a later read or map finds out whether the block is whole."""
    # A FIFO is no block, and must not be waited for.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def wrong_size(size: int, found: str) -> OSError:
    """Return the error for a file of a wrong size."""
    return OSError(errno.EFBIG, f"expected a file of {size} bytes, got {found}")


def check_size(fd: int, size: int) -> None:
    """Raise OSError(EFBIG) for a file of another size.

    A read beyond the file's end finds the size. With passthrough the kernel answers it in 2 us,
    while fstat of an open file asks the daemon, 35 us.
    """
    count = len(os.pread(fd, 2, size - 1))
    if count != 1:
        raise wrong_size(size, "more" if count else "less")


def read_into(fd: int, target: Sequence[memoryview]) -> None:
    """Fill all runs of `target`, one after the other, with the whole file.

    Raises OSError(EFBIG) for a file of another size.
    """
    size, done = sum(map(len, target)), 0
    runs = [*target, memoryview(bytearray(1))]  # one byte more, which must stay unread
    if len(runs) <= _AT_ONCE and (done := os.preadv(fd, runs, 0)) == size:
        return
    while rest := _after(runs, done):
        count = os.preadv(fd, rest, done)
        done += count
        if not count or (done >= size and count < sum(map(len, rest))):
            break
    if done != size:
        raise wrong_size(size, "more" if done > size else f"{done}")


def _after(runs: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the runs after the first `done` bytes, as many as one system call takes."""
    rest: list[memoryview] = []
    for run in runs:
        if len(rest) == _AT_ONCE:
            break
        if done < len(run):
            rest.append(run[done:])
        done = max(0, done - len(run))
    return rest


def map_block(
    fd: int,
    size: int,
    *,
    shared: bool = False,
    unmapped: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return the file as a uint8 tensor, which keeps the mapping; the descriptor may be closed.

    Raises OSError(EFBIG) for a file of another size.

    - shared: map the pages of the file itself, read only, for a device that pins them. Writing into
      such a tensor kills the process.
    - unmapped: is called when the mapping is gone, and never if no mapping is made.
    """
    check_size(fd, size)
    prot, flags = (_READ, _SHARED) if shared else (_READ | _WRITE, _PRIVATE | _NORESERVE)
    # Python's mmap duplicates the descriptor, which costs one more FLUSH at its close.
    address = _LIBC.mmap(None, size, prot, flags, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    pages = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(pages, _unmap, address, size, unmapped).atexit = False
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unmap(address: int, size: int, unmapped: Callable[[], None]) -> None:
    _LIBC.munmap(address, size)
    unmapped()


def create(path: str) -> int:
    """Create a file for writing and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[None]:
    """Close at the end, where the network or a quota may report an error."""
    try:
        yield
    finally:
        os.close(fd)


def write_all(fd: int, content: Sequence[memoryview], path: str) -> None:
    """Write all runs, one after the other, from the beginning on."""
    done = 0
    while rest := _after(content, done):
        count = os.pwritev(fd, rest, done)
        if not count:
            size = sum(map(len, content))
            raise OSError(errno.EIO, f"{done} of {size} bytes written", path)
        done += count


def write_temporary(directory: str, name: str, content: Sequence[memoryview]) -> str:
    """Write all runs to a new file below `directory`, and return its unique path."""
    path = f"{directory}/{name}.{secrets.token_hex(8)}.tmp"
    fd = create(path)
    try:
        with closing(fd):
            write_all(fd, content, path)
    except BaseException:
        discard(path)
        raise
    return path


def publish(temporary: str, path: str) -> None:
    """Give a written file its name; on failure the file is removed."""
    try:
        os.rename(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def is_inode(path: str, number: int) -> bool:
    """Return whether the path still names this file."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path, follow_symlinks=False).st_ino == number
    return False


def discard(path: str) -> None:
    """Unlink a file that will get no name."""
    with contextlib.suppress(FileNotFoundError):  # the directory may have been dropped with it
        os.unlink(path)
