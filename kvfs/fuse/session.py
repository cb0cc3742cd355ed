"""Mounting: /dev/fuse and pyfuse3's session, with passthrough where it is to be had.

Contract: as root the mount is made here with mount(2), and the C part gives pyfuse3 our open
device; without root, stock libfuse asks fusermount3 and the daemon serves all bytes. pyfuse3 is
imported by `open_session` only, after the C part. Not for what operations do.
"""

import contextlib
import logging
import os
import subprocess
from typing import TYPE_CHECKING, Union

from kvfs import mounts, runtime
from kvfs.config import Config
from kvfs.errors import ConfigError, KvfsError
from kvfs.fuse.served import Served

if TYPE_CHECKING:
    from kvfs.fuse.operations import Operations
    from kvfs.fuse.passthrough import Passthrough

log = logging.getLogger(__name__)

MAX_READ = 1 << 20  # bytes of one FUSE read; the kernel's limit with 4 KiB pages
# Handlers at a time. pyfuse3's own 99 may all wait for a disk that hangs, and then nobody would
# read the requests that need no disk. A task is a few KiB, and is made when it is needed.
TASKS = 10_000
FSTYPE = runtime.FSTYPE
_FLAGS = {
    "ro": mounts.MS_RDONLY,
    "nosuid": mounts.MS_NOSUID,
    "nodev": mounts.MS_NODEV,
    "noexec": mounts.MS_NOEXEC,
    "noatime": mounts.MS_NOATIME,
}

ServedOrNot = Union["Passthrough", Served]


def open_backings(config: Config) -> tuple[ServedOrNot, int, int]:
    """(who serves bytes, file handle slots, open /dev/fuse or -1). Raises ConfigError."""
    if os.geteuid() != 0:
        if config.passthrough == "on":
            raise ConfigError("passthrough=on needs root (CAP_SYS_ADMIN); mount as root, or auto")
        from kvfs.fuse.served import SLOTS as SERVED_SLOTS  # noqa: PLC0415

        why = "turned off by passthrough=off" if config.passthrough == "off" else "needs root"
        return Served(why), SERVED_SLOTS, -1
    from kvfs.fuse.passthrough import SLOTS, Passthrough  # noqa: PLC0415 (before pyfuse3)

    try:
        # Non-blocking: a request may be withdrawn between poll and read.
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"/dev/fuse cannot be opened: {error}; try: modprobe fuse") from error
    return Passthrough(device, wanted=config.passthrough != "off"), SLOTS, device


class Session:
    """A mounted file system. `run` serves it until it is unmounted by anyone."""

    def __init__(self, config: Config, operations: "Operations", device: int) -> None:
        """Raises KvfsError if it cannot be mounted; then nothing is mounted."""
        import pyfuse3  # noqa: PLC0415 (after the C part)

        self._pyfuse3 = pyfuse3
        self.mountpoint = config.mountpoint
        self._device = device
        if device >= 0:
            self._mount(config)
        options = {"default_permissions"}
        if device < 0:
            options |= {"fsname=kvfs", "subtype=kvfs", *config.mount_flags}
            options |= {"allow_other"} if config.allow_other else set()
        try:
            pyfuse3.init(operations, str(config.mountpoint), options)
        except RuntimeError as error:
            if device >= 0:
                self.unmount()
                os.close(device)
            raise KvfsError(
                f"{config.mountpoint} cannot be mounted: {error}; `kvfs doctor` may know why"
            ) from error

    def _mount(self, config: Config) -> None:
        data = (
            f"fd={self._device},rootmode=40000,user_id=0,group_id=0,default_permissions,"
            f"max_read={MAX_READ}" + (",allow_other" if config.allow_other else "")
        )
        # A cache has no use for programs with rights of their own, nor for devices.
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        for flag in config.mount_flags:
            flags |= _FLAGS[flag]
        try:
            mounts.mount("kvfs", config.mountpoint, FSTYPE, flags, data)
        except OSError as error:
            os.close(self._device)
            raise KvfsError(f"mount on {config.mountpoint} failed: {error}") from error

    async def run(self) -> None:
        await self._pyfuse3.main(max_tasks=TASKS)

    def invalidate(self, parent: int, name: bytes) -> None:
        """Blocks; not from the loop. Raises OSError."""
        self._pyfuse3.invalidate_entry(self._pyfuse3.InodeT(parent), self._pyfuse3.FileNameT(name))

    def unmount(self) -> None:
        """Unmount; if somebody is in it, detach: `run` ends when the last one has left."""
        if self._device < 0:
            for option in ("-u", "-uz"):
                ended = subprocess.run(
                    ["fusermount3", option, "--", self.mountpoint], check=False, capture_output=True
                )
                if ended.returncode == 0:
                    return
            return
        try:
            mounts.umount(self.mountpoint)
        except OSError as error:
            log.warning(
                "%s is busy (%s): detached, it ends with the last open file", self.mountpoint, error
            )
            with contextlib.suppress(OSError):  # somebody else was faster
                mounts.umount(self.mountpoint, mounts.MNT_DETACH)

    def close(self) -> None:
        """After `run` has ended."""
        self._pyfuse3.close(unmount=False)
