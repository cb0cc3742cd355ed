"""mount(2) and umount2(2). What is mounted where: see `kvfs.runtime`."""

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
