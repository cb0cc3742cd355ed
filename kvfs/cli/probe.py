"""Tests the kernel's real support: it tries a FUSE connection and a tmpfs, and removes them.

Not a command: `kvfs doctor` runs it as `unshare --mount python -m kvfs.cli.probe DIRECTORY`, so
that its mounts end with it. Prints one JSON object: for each test, an empty string if it works,
else the reason.
"""

import fcntl
import json
import os
import struct
import sys
from pathlib import Path

from kvfs.mounts import mount

MIB = 1 << 20
HUGE_PAGE = 2 * MIB

# The kernel's include/uapi/linux/fuse.h; distributions' headers may be older than the kernel.
IN_HEADER = struct.Struct("=IIQQIIIHH")
INIT_IN = struct.Struct("=IIIII44x")
INIT_OUT = struct.Struct("=IiQ IIIIHHIIHHII24x")
OUT_LENGTH = 80
FUSE_INIT = 26
INIT_EXT = 1 << 30
FLAGS2_PASSTHROUGH = 1 << 5
BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
BACKING_MAP = struct.Struct("=iIQ")
READ_BUFFER = MIB + 4096
MAX_WRITE = MIB
OPTIONS = "rootmode=40000,user_id=0,group_id=0"


def huge_pages(directory: Path) -> str:
    """Mount a tmpfs there as the RAM tier does, and test whether it takes a huge page."""
    mount("kvfs-probe", directory, "tmpfs", 0, f"size={8 * MIB},huge=within_size")
    with (directory / "backing").open("wb") as file:
        os.ftruncate(file.fileno(), HUGE_PAGE)
        os.pwrite(file.fileno(), b"x", 0)
        taken = os.fstat(file.fileno()).st_blocks * 512
    return "" if taken >= HUGE_PAGE else f"a first byte took {taken} bytes, not a huge page"


def passthrough(directory: Path) -> str:
    """Answer the kernel's INIT, as a daemon does, and register a backing file."""
    mountpoint = directory / "mount"
    mountpoint.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    mount("kvfs-probe", mountpoint, "fuse", 0, f"fd={device},{OPTIONS}")
    request = os.read(device, READ_BUFFER)
    _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != FUSE_INIT:
        return f"the kernel's first request is {opcode}, not INIT"
    major, minor, readahead, flags, flags2 = INIT_IN.unpack_from(request, IN_HEADER.size)
    if not (flags & INIT_EXT and flags2 & FLAGS2_PASSTHROUGH):
        return "the kernel does not offer it: Linux < 6.9, or CONFIG_FUSE_PASSTHROUGH is not set"
    header = (OUT_LENGTH, 0, unique)
    init = (major, minor, readahead, INIT_EXT, 0, 0, MAX_WRITE, 1, 0, 0, FLAGS2_PASSTHROUGH, 1)
    os.write(device, INIT_OUT.pack(*header, *init))
    with (directory / "backing").open("rb") as backing:
        fcntl.ioctl(device, BACKING_OPEN, bytearray(BACKING_MAP.pack(backing.fileno(), 0, 0)))
    return ""


def main(directory: Path) -> None:
    """Try both there, and print the results."""
    results = {}
    for trial in (huge_pages, passthrough):
        try:
            results[trial.__name__] = trial(directory)
        except OSError as error:
            results[trial.__name__] = error.strerror or str(error)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
