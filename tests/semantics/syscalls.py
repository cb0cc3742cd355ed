"""System calls that Python has no name for, and calls made as another user.

Contract: thin; a call that fails raises OSError with its errno, as os functions do. Not for kvfs.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
FALLOC_FL_KEEP_SIZE = 1
MAX_HANDLE = 128
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)
libc.opendir.restype = libc.readdir64.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
for _name in ("readdir64", "telldir", "closedir"):
    getattr(libc, _name).argtypes = [ctypes.c_void_p]
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
# Python's mmap keeps a descriptor of its own, for which kvfs has a handle: these do not.
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def renameat2(source: Path | str, target: Path | str, flags: int) -> None:
    _checked(libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags))


def linkat(source: Path | str, target: Path | str, flags: int) -> None:
    """linkat(2), because os.link never follows symbolic links on Linux."""
    _checked(libc.linkat(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags))


def fallocate(descriptor: int, mode: int, length: int) -> None:
    _checked(libc.fallocate(descriptor, mode, ctypes.c_long(0), ctypes.c_long(length)))


def utimensat(path: Path, access: int, modification: int) -> None:
    """utimensat(2), with nanoseconds of 1970's first second, or one of the two special values."""
    times = struct.pack("qqqq", 0, access, 0, modification)
    _checked(libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0))


def name_to_handle(path: Path) -> bytes:
    """The handle that an NFS server would hand out, as `struct file_handle`."""
    handle = ctypes.create_string_buffer(struct.pack("Ii", MAX_HANDLE, 0), 8 + MAX_HANDLE)
    mount_id = ctypes.c_int()
    _checked(libc.name_to_handle_at(AT_FDCWD, os.fsencode(path), handle, ctypes.byref(mount_id), 0))
    return handle.raw


def open_by_handle(mountpoint: Path, handle: bytes, flags: int = os.O_RDONLY) -> int:
    with opened(mountpoint, os.O_RDONLY | os.O_DIRECTORY) as mount:
        return _checked(libc.open_by_handle_at(mount, handle, flags))


def drop_caches() -> None:
    """Make the kernel forget all unused names, inodes and pages."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


class Listing(Iterator[bytes]):
    """A directory read name by name, with telldir(3) and seekdir(3)."""

    def __init__(self, path: Path, *, dots: bool = False) -> None:
        self._dots = dots
        self._stream = libc.opendir(os.fsencode(path))
        assert self._stream, path

    def __next__(self) -> bytes:
        while entry := libc.readdir64(self._stream):
            name = ctypes.string_at(entry + 19)  # behind d_ino, d_off, d_reclen and d_type
            if self._dots or name not in {b".", b".."}:
                return name
        raise StopIteration

    def tell(self) -> int:
        return int(libc.telldir(self._stream))

    def seek(self, place: int) -> None:
        libc.seekdir(self._stream, place)

    def close(self) -> None:
        libc.closedir(self._stream)


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """An open descriptor, closed at the end."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def refused(code: int) -> Iterator[None]:
    """Expect the block to fail with this errno."""
    found = 0
    try:
        yield
    except OSError as error:
        found = error.errno or -1
    names = [errno.errorcode.get(number, str(number)) for number in (found, code)]
    assert found == code, f"{names[0]}, expected {names[1]}"


def as_nobody(directory: Path, call: Callable[[], object]) -> int:
    """Make a call as an unprivileged user who is in `directory`; return its errno, or 0.

    The call is in a child, because a process does not get its privileges back. Its paths are
    relative, because that user may not search the directories above.
    """
    child = os.fork()
    if not child:
        code = 255
        try:
            os.chdir(directory)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0o022)
            call()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
