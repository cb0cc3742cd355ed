"""Comparison floor: a one-directory pyfuse3 file system over the kernel's passthrough.

Argument: mount point. Environment: BASELINE_DEVICE (open /dev/fuse), BASELINE_LIBRARY (the
compiled passthrough.c), BASELINE_BACK (folder of backing files), BASELINE_STATE (file).
"""
# ruff: noqa: ANN401, ARG002  (pyfuse3 says what these methods are called with)

import ctypes
import errno
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

library = ctypes.CDLL(os.environ["BASELINE_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
library.baseline_bind.argtypes = [ctypes.c_uint64, ctypes.c_int]

# After the library: its fuse_session_mount must be found before libfuse's.
import pyfuse3  # noqa: E402
import trio  # noqa: E402

BACK = Path(os.environ["BASELINE_BACK"])
STATE = Path(os.environ["BASELINE_STATE"])


class Operations(pyfuse3.Operations):
    """The design as it was first tried.

    Backing ids are read from a file at each open: cheap for one object, so it is measured with one.
    """

    supports_dot_lookup = True

    def __init__(self) -> None:
        super().__init__()
        names = sorted(os.listdir(BACK))
        self.inode = {name: number for number, name in enumerate(names, 2)}
        self.name = {number: name for name, number in self.inode.items()}
        self.handle = time.time_ns() // 1_000_000 % 1_000_000

    def path(self, inode: int) -> Path:
        return BACK / self.name[inode]

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.attr_timeout = entry.entry_timeout = 60
        entry.st_mode = stat.S_IFDIR | 0o755 if inode == 1 else stat.S_IFREG | 0o644
        if inode != 1:
            entry.st_size = os.stat(self.path(inode)).st_size
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        if name in {b".", b".."}:
            return await self.getattr(parent)
        if name.decode() not in self.inode:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self.inode[name.decode()])

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return self.opened(inode)

    def opened(self, inode: int) -> Any:
        ids = json.loads(STATE.read_text()) if STATE.exists() else {}
        if str(inode) not in ids:  # all opens of one inode share one backing id, else EIO
            descriptor = os.open(self.path(inode), os.O_RDWR)
            ids[str(inode)] = library.baseline_backing_open(descriptor)
            os.close(descriptor)
            STATE.write_text(json.dumps(ids))
        self.handle += 1
        library.baseline_bind(self.handle, ids[str(inode)])
        return pyfuse3.FileInfo(fh=self.handle)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        text = name.decode()
        os.close(os.open(BACK / text, os.O_CREAT | os.O_RDWR))
        inode = self.inode.setdefault(text, max(self.name, default=1) + 1)
        self.name[inode] = text
        return self.opened(inode), await self.getattr(inode)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        text = name.decode()
        os.unlink(BACK / text)
        del self.name[self.inode.pop(text)]

    async def release(self, fh: int) -> None:
        pass


pyfuse3.init(Operations(), sys.argv[1], {"default_permissions"})
trio.run(pyfuse3.main)
