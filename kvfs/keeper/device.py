"""Mounting: the open /dev/fuse that all daemons of a mount share.

Contract: root mounts with mount(2), other users through fusermount3, which is set-user-id. The
connection lives as long as some process holds the descriptor. Not for serving the mount.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvfs import mounts, runtime
from kvfs.errors import KvfsError

MAX_READ = 1 << 20  # bytes of one FUSE read; the kernel's limit with 4 KiB pages


def mount(mountpoint: Path, flags: Sequence[str], *, allow_other: bool) -> int:
    """Mount and return the open /dev/fuse, non-blocking. Raises KvfsError; nothing is mounted."""
    options = ["default_permissions", f"max_read={MAX_READ}"]
    options += ["allow_other"] if allow_other else []
    if os.geteuid() == 0:
        device = _mount(mountpoint, flags, options)
    else:
        device = _fusermount(mountpoint, [*options, "fsname=kvfs", "subtype=kvfs", *flags])
    os.set_blocking(device, False)  # a request may be withdrawn between poll and read
    return device


def _mount(mountpoint: Path, flags: Sequence[str], options: list[str]) -> int:
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise KvfsError(f"/dev/fuse cannot be opened: {error}; try: modprobe fuse") from error
    data = ",".join([f"fd={device},rootmode=40000,user_id=0,group_id=0", *options])
    # A cache needs no set-user-id programs and no devices.
    bits = mounts.MS_NOSUID | mounts.MS_NODEV
    for flag in flags:
        bits |= mounts.FLAGS[flag]
    try:
        mounts.mount("kvfs", mountpoint, runtime.FSTYPE, bits, data)
    except OSError as error:
        os.close(device)
        raise KvfsError(f"mount on {mountpoint} failed: {error}") from error
    return device


def _fusermount(mountpoint: Path, options: list[str]) -> int:
    """Mount as libfuse does: fusermount3 sends the descriptor through a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                ["fusermount3", "-o", ",".join(options), "--", mountpoint],
                env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise KvfsError("fusermount3 is not installed: install the package fuse3") from None
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if done.returncode or not descriptors:
        raise KvfsError(f"mount on {mountpoint} failed: {done.stderr.strip() or 'no descriptor'}")
    return descriptors[0]


def unmount(mountpoint: Path, *, lazy: bool) -> str:
    """Unmount, or return why not. lazy: detach; the mount ends with the last open file."""
    command = [*mounts.umount_command(lazy=lazy), "--", str(mountpoint)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
