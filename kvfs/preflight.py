"""Whether this machine has what a configuration asks for.

Contract: each check takes plain values, changes nothing, and raises ConfigError with one line that
names the option, the value, what was expected and, where there is one, the cure. What holds now may
not hold at the mount: the daemon still meets each error where it happens.
Invariant: the mount point is looked up in the table of mounts before it is touched, or a dead mount
there would hang the check.
Not for the syntax of options (config), nor for trials of the kernel (cli/probe).
"""

import errno
import os
from pathlib import Path

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.units import MIB, format_size

SMALLEST_TIER = 16 * MIB  # eight huge pages, and more than any connector's default file

_NVME_SHARE = 0.80
_OVERLAYFS_MAGIC = 0x794C7630


def check_mountpoint(mountpoint: Path) -> None:
    """Expect a directory on which nothing is mounted."""
    # Before any stat: that could hang on a daemon which does not answer.
    if mount := runtime.mount_at(mountpoint):
        raise ConfigError(
            f"{mountpoint} is already a mount point ({mount.fstype}); if it answers "
            f"'{os.strerror(errno.ENOTCONN)}', its daemon has died: umount -l {mountpoint}"
        )
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
    """Hold sizes and directories against this machine."""
    if ram > (most := runtime.memory()):
        raise ConfigError(f"ram={format_size(ram)}: more than the memory, {most // MIB}M")
    if nvme is not None:
        _check_apart("nvme", nvme, mountpoint)
        _check_tier_directory(nvme, nvme_size)
    if log is not None:
        _check_apart("log", log, mountpoint)
        _check_log(log)


def default_nvme_size(directory: Path) -> int:
    """80 % of what is free on the file system of the tier's directory."""
    volume = os.statvfs(_existing(directory))
    size = int(volume.f_bavail * volume.f_frsize * _NVME_SHARE) // MIB * MIB
    if size < SMALLEST_TIER:
        raise ConfigError(
            f"nvme={directory}: 80 % of what is free there is {format_size(size)}, "
            f"expected at least {format_size(SMALLEST_TIER)}; free some, or give nvme_size"
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


def _check_apart(name: str, path: Path, mountpoint: Path) -> None:
    """Keep apart what would make a daemon wait for itself: what it needs, and its mount."""
    real = Path(os.path.realpath(path))
    if real.is_relative_to(mountpoint):
        raise ConfigError(
            f"{name}={path} is inside the mount point {mountpoint}; it must be elsewhere"
        )
    if mountpoint.is_relative_to(real):
        raise ConfigError(f"mount point {mountpoint} is inside {name}={path}; it must be elsewhere")


def _check_tier_directory(directory: Path, size: int) -> None:
    place = _existing(directory)
    if runtime.filesystem_magic(place) == _OVERLAYFS_MAGIC:
        raise ConfigError(
            f"nvme={directory} is on overlayfs, which kernel passthrough cannot stack on; "
            "use a directory on ext4 or xfs, in a container a volume"
        )
    if mount := runtime.kvfs_holding(Path(os.path.realpath(place))):
        raise ConfigError(
            f"nvme={directory} is on {mount.path}, which is a kvfs itself; expected a directory "
            "on ext4 or xfs"
        )
    volume = os.statvfs(place)
    if volume.f_flag & os.ST_RDONLY:
        raise ConfigError(f"nvme={directory} is on a read-only file system")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"nvme={directory}: uid {os.geteuid()} may not write to {place}")
    if size > (most := volume.f_blocks * volume.f_frsize):
        raise ConfigError(
            f"nvme_size={format_size(size)}: more than the device has, {most // MIB}M"
        )


def _check_log(path: Path) -> None:
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK, effective_ids=True):
        raise ConfigError(f"log={path}: expected a file that uid {os.geteuid()} may write")
