"""mount(2), umount2(2) and syncfs(2), which Python lacks. `kvfs.runtime` knows what is mounted."""

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MNT_DETACH = 2


def mount(source: str, target: Path, fstype: str, flags: int, data: str) -> None:
    """Raises OSError as mount(2) does."""
    ok = _libc.mount(
        source.encode(),
        os.fsencode(target),
        fstype.encode(),
        ctypes.c_ulong(flags),
        data.encode(),
    )
    if ok != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def umount(target: Path, flags: int = 0) -> None:
    """Raises OSError as umount2(2) does."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def syncfs(path: Path) -> None:
    """Sync the file system that a directory is on. Raises OSError as syncfs(2) does."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)
