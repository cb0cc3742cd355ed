"""System calls that Python lacks: mount(2), umount2(2), syncfs(2), statx(2) and others.

They include sync_file_range(2). `kvfs.runtime` knows the table of mounts.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from struct import Struct

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_RELATIME = 1 << 21
# The words of mount(8) and mountinfo for these, and for those that only a remount has to keep.
FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
}
_KEPT = {"nosymfollow": 256, "nodiratime": 2048, "relatime": MS_RELATIME}
MNT_DETACH = 2
AT_FDCWD = -100
SYNC_FILE_RANGE_WAIT_BEFORE = 1
STATX_MNT_ID_UNIQUE = 0x4000
# Numbers of system calls: the same on all architectures, as for all recent ones.
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _MOUNT_ATTR_RDONLY = 1, 0x1000, 1  # linux/mount.h, linux/fcntl.h
_MOUNT_ATTR = Struct("=QQQQ")  # struct mount_attr: to set, to clear, propagation, user namespace
_AT_STATX_DONT_SYNC = 0x4000
# Bytes: of struct statx, and before its stx_dev_major, stx_dev_minor and stx_mnt_id.
_STATX_SIZE, _STATX_DEVICE, _STATX_MNT_ID = 256, 136, 144


def mount(source: str, target: Path, fstype: str, flags: int, data: str) -> None:
    """Mount as mount(2) does. Raises OSError."""
    at, kind = os.fsencode(target), fstype.encode()
    if _libc.mount(source.encode(), at, kind, ctypes.c_ulong(flags), data.encode()) != 0:
        raise _failure(target)


def remount(target: Path, words: Iterable[str]) -> None:
    """Give a mount and its file system exactly these flags. Raises OSError as mount(2) does.

    Words that are no flags are ignored. EBUSY: a file is open for writing, and `ro` is new.
    """
    known = FLAGS | _KEPT
    flags = MS_REMOUNT
    for word in words:
        flags |= known.get(word, 0)
    if not flags & MS_NOATIME:
        flags |= MS_RELATIME  # without any word about times, the kernel keeps a former noatime
    else:
        flags &= ~MS_RELATIME
    # Without options: FUSE takes none here, and they stay as they are.
    mount("kvfs", target, "", flags, "")


def _failure(path: Path | None = None) -> OSError:
    """Return the error of the last call."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), *([] if path is None else [str(path)]))


def umount(target: Path, flags: int = 0) -> None:
    """Unmount as umount2(2) does. Raises OSError."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise _failure(target)


def umount_command(*, lazy: bool) -> list[str]:
    """Return the command that unmounts the mount point behind it; lazy: that detaches it."""
    if os.geteuid() == 0:
        # The path is canonical; a look at it could ask a daemon that hangs.
        return ["umount", "--no-canonicalize", *(["-l"] if lazy else [])]
    return ["fusermount3", "-u", *(["-z"] if lazy else [])]


def read_only(path: Path) -> int:
    """Return a descriptor of a new read-only mount of the file system at a path.

    The mount is in no namespace. It ends when the descriptor, and all that were opened from it, are
    closed. Raises OSError as open_tree(2) and mount_setattr(2) do: root may, since Linux 5.12.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    found = _libc.syscall(_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)
    if found < 0:
        raise _failure(path)
    assert isinstance(found, int)
    wanted = _MOUNT_ATTR.pack(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    if _libc.syscall(_MOUNT_SETATTR, found, b"", _AT_EMPTY_PATH, wanted, len(wanted)) != 0:
        failure = _failure(path)
        os.close(found)
        raise failure
    return found


def syncfs(path: Path) -> None:
    """Sync the file system that a directory is on. Raises OSError as syncfs(2) does."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            raise _failure(path)
    finally:
        os.close(fd)


def expect_written(fd: int) -> None:
    """Raises OSError if the kernel could not write some bytes of a file, and has not reported it.

    The page cache may have lost them, so that a read gives zeros. The call writes nothing, and
    waits only for the first page, if that is on its way to the disk. The kernel reports an error
    once: the caller has to remember it (errseq_t, https://docs.kernel.org/core-api/errseq.html).
    """
    offset, one = ctypes.c_int64(0), ctypes.c_int64(1)
    if _libc.sync_file_range(fd, offset, one, SYNC_FILE_RANGE_WAIT_BEFORE) != 0:
        raise _failure()


def device(fd: int) -> str:
    """Return MAJOR:MINOR of the file system of an open file, as mountinfo has it.

    It asks no file system: the kernel knows the answer. Raises OSError as statx(2) does.
    """
    found, flags = ctypes.create_string_buffer(_STATX_SIZE), _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(fd, b"", flags, 0, found) != 0:
        raise _failure()
    major, minor = Struct("=II").unpack_from(found.raw, _STATX_DEVICE)
    return f"{major}:{minor}"


def number(path: Path) -> int:
    """Return the number of the mount that a path is on; no other mount has it before a reboot.

    0 before Linux 6.8, which has no such numbers. Raises OSError as statx(2) does.
    """
    found = ctypes.create_string_buffer(_STATX_SIZE)
    if _libc.statx(AT_FDCWD, os.fsencode(path), 0, STATX_MNT_ID_UNIQUE, found) != 0:
        raise _failure(path)
    if not int.from_bytes(found.raw[:4], sys.byteorder) & STATX_MNT_ID_UNIQUE:
        return 0
    return int.from_bytes(found.raw[_STATX_MNT_ID : _STATX_MNT_ID + 8], sys.byteorder)
