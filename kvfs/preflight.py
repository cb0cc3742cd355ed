"""Checks whether this machine has the resources of a configuration.

Contract: each check takes plain values, changes nothing, and raises ConfigError with one line that
names the option, the value, the expected one and, where there is one, the cure. A check may pass
and the mount still fail later, so the daemon handles each error where it happens.

Invariant: the checks look up the mount point in the table of mounts before they touch it, because a
dead mount there would hang them. Not for the syntax of options (config), nor for trials of the
kernel (cli/probe).
"""

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.units import MIB, format_size

SMALLEST_TIER = 16 * MIB  # eight huge pages, and more than any connector's default file

_NVME_SHARE = 0.80
# The beginning of each line of `kvfs.core.namespaces.access_log`, also of one cut by a crash.
_ACCESS = re.compile(rb'\{"(op":"(read|write|absent|rename|drop)"|t":[\d.]+,"op":"lost")')
_OVERLAYFS_MAGIC = 0x794C7630


def check_mountpoint(mountpoint: Path) -> None:
    """Expect a directory that is no mount point."""
    # Before any stat: that could hang on a daemon which does not answer.
    if mount := runtime.mount_at(mountpoint):
        cure = "give another directory"
        if mount.fstype == runtime.FSTYPE:
            cure = (
                f"unmount it first, also if it answers '{os.strerror(errno.ENOTCONN)}': "
                f"kvfs umount {mountpoint}"
            )
        raise ConfigError(f"{mountpoint} is already a mount point ({mount.fstype}); {cure}")
    try:
        is_directory = mountpoint.is_dir()
        mountpoint.stat()
    except FileNotFoundError:
        raise ConfigError(
            f"mount point {mountpoint} does not exist; mkdir -p {mountpoint}"
        ) from None
    except OSError as error:
        raise ConfigError(f"mount point {mountpoint}: {error.strerror}") from None
    if not is_directory:
        raise ConfigError(f"mount point {mountpoint} is not a directory")


def check_resources(
    mountpoint: Path, *, ram: int, nvme: Path | None, nvme_size: int, log: Path | None
) -> None:
    """Compare sizes and directories with this machine."""
    if ram > (most := runtime.memory()):
        raise ConfigError(
            f"ram={format_size(ram)}: more than the memory, expected {most // MIB}M at most"
        )
    if nvme is not None:
        check_apart("nvme", nvme, mountpoint)
        _check_tier_directory(nvme, nvme_size)
    if log is not None:
        check_apart("log", log, mountpoint)
        _check_log(log)


def check_access_log(path: Path, mountpoint: Path, tiers: Iterable[Path]) -> None:
    """Expect a new file, or an access log to append to, outside of the mount and its tiers."""
    check_apart("access_log", path, mountpoint)
    real = Path(os.path.realpath(path))
    if mount := runtime.kvfs_holding(real):
        raise ConfigError(
            f"access_log={path} is on {mount.path}, a mount of kvfs: give a file elsewhere"
        )
    for directory in tiers:
        if real.is_relative_to(os.path.realpath(directory)):
            raise ConfigError(
                f"access_log={path} is inside {directory}, which has a tier: give a file elsewhere"
            )
    check_access_file(path)
    check_access_file(older(path))  # it is replaced


def older(path: Path) -> Path:
    """Return the path of the older half of an access log."""
    return path.with_name(f"{path.name}.1")


def check_access_file(path: Path) -> None:
    """Expect no file at this path, or one that `expect_accesses` takes."""
    try:
        expect_regular(path, path.lstat())  # an open alone may affect a device
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"access_log={path} cannot be examined: {error.strerror}") from error
    try:
        expect_accesses(path, file)
    finally:
        os.close(file)


def expect_regular(path: Path, found: os.stat_result) -> None:
    """Refuse to write to a device, directory, pipe or link."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"access_log={path} is no regular file, {stat.filemode(found.st_mode)}: give a new name"
        )


def expect_accesses(path: Path, file: int) -> None:
    """Expect that an open file is a regular one, and empty or an access log."""
    expect_regular(path, os.fstat(file))
    first = os.pread(file, 64, 0)
    if first and not _ACCESS.match(first):
        raise ConfigError(
            f"access_log={path} is no access log, and kvfs does not change it: give a new name"
        )


def default_nvme_size(directory: Path) -> int:
    """Return 80 % of the free bytes on the file system of the tier's directory."""
    volume = os.statvfs(_existing(directory))
    size = int(volume.f_bavail * volume.f_frsize * _NVME_SHARE) // MIB * MIB
    if size < SMALLEST_TIER:
        raise ConfigError(
            f"nvme={directory}: 80 % of the free space is {format_size(size)}, expected at least "
            f"{format_size(SMALLEST_TIER)}: free some space, or give nvme_size"
        )
    return size


def _existing(directory: Path) -> Path:
    """Return the tier's directory, or the parent in which the mount will create it."""
    for place in (directory, directory.parent):
        try:
            if place.is_dir():
                return place
            place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"nvme={directory}: {error.strerror}") from None
        raise ConfigError(f"nvme={directory}: {place} is not a directory")
    raise ConfigError(f"nvme={directory}: {directory.parent} does not exist; mkdir -p {directory}")


def check_apart(name: str, path: Path, mountpoint: Path) -> None:
    """Refuse a path inside the mount point, which hides it, or around the mount point.

    A daemon that uses a file there would wait for itself.
    """
    real = Path(os.path.realpath(path))
    if real.is_relative_to(mountpoint):
        raise ConfigError(
            f"{name}={path} is inside the mount point {mountpoint}: give a path elsewhere"
        )
    if mountpoint.is_relative_to(real):
        raise ConfigError(
            f"mount point {mountpoint} is inside {name}={path}: give a path elsewhere"
        )


def _check_tier_directory(directory: Path, size: int) -> None:
    place = _existing(directory)
    if runtime.filesystem_magic(place) == _OVERLAYFS_MAGIC:
        raise ConfigError(
            f"nvme={directory} is on overlayfs, which passthrough cannot use: expected a directory "
            "on ext4 or xfs, in a container a volume"
        )
    if mount := runtime.kvfs_holding(Path(os.path.realpath(place))):
        raise ConfigError(
            f"nvme={directory} is on {mount.path}, a mount of kvfs: expected a directory on ext4 "
            "or xfs"
        )
    if place == directory and place.stat().st_mode & 0o022:
        raise ConfigError(f"nvme={directory}: other users can write there; chmod go-w {directory}")
    volume = os.statvfs(place)
    if volume.f_flag & os.ST_RDONLY:
        raise ConfigError(f"nvme={directory} is on a read-only file system: mount it writable")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"nvme={directory}: uid {os.geteuid()} may not write to {place}; chown it"
        )
    if size > (most := volume.f_blocks * volume.f_frsize):
        raise ConfigError(
            f"nvme_size={format_size(size)}: more than the device has, expected {most // MIB}M "
            "at most"
        )


def _check_log(path: Path) -> None:
    try:
        place = path if path.exists() else path.parent
        good = not path.is_dir() and os.access(place, os.W_OK, effective_ids=True)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"log={path}: {error.strerror}") from None
    if not good and not place.exists():
        raise ConfigError(f"log={path}: {place} does not exist; mkdir -p {place}")
    if not good:
        raise ConfigError(f"log={path}: expected a file that uid {os.geteuid()} may write")
