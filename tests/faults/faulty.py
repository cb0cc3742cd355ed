"""A directory, mounted elsewhere with faults: errors, delays and silence, by operation.

Run as `python faulty.py SOURCE MOUNTPOINT RULES`. RULES is a JSON file that is read before each
operation: {"open": {"errno": 5}} or {"fsync": {"hang": true}}. A hang ends when its rule does. The
key "*" means every operation that may wait for a disk on a real file system. Operations that look
at an open file, or close one, never wait, and are answered without the rules.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, InodeT, RequestContext

T = TypeVar("T")
FOREVER = 3600.0  # s that the kernel may keep what it has been told: nobody else writes here


class Faulty(pyfuse3.Operations):
    """Inode numbers are those of the source, whose paths it remembers."""

    enable_writeback_cache = False

    def __init__(self, source: Path, rules: Path) -> None:
        super().__init__()
        self.rules = rules
        self.paths = {pyfuse3.ROOT_INODE: source}

    async def _do(self, name: str, call: Callable[[], T]) -> T:
        while True:
            rules = json.loads(self.rules.read_text())
            rule = rules.get(name, rules.get("*", {}))
            if not rule.get("hang"):
                break
            await trio.sleep(0.01)
        if "errno" in rule:
            raise FUSEError(rule["errno"])
        await trio.sleep(rule.get("delay", 0))
        try:
            return call()
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None

    def _attributes(self, path: Path) -> EntryAttributes:
        try:
            found = path.lstat()
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        entry = EntryAttributes()
        for name in ("mode", "nlink", "uid", "gid", "size", "blocks"):
            setattr(entry, f"st_{name}", getattr(found, f"st_{name}"))
        for name in ("atime", "mtime", "ctime"):
            setattr(entry, f"st_{name}_ns", getattr(found, f"st_{name}_ns"))
        root = path == self.paths[pyfuse3.ROOT_INODE]
        entry.st_ino = pyfuse3.ROOT_INODE if root else InodeT(found.st_ino)
        entry.entry_timeout = entry.attr_timeout = FOREVER
        self.paths[entry.st_ino] = path
        return entry

    def _path(self, parent: InodeT, name: bytes) -> Path:
        return self.paths[parent] / os.fsdecode(name)

    async def lookup(self, parent: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self._do("lookup", lambda: self._attributes(self._path(parent, name)))

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self.paths[inode])

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        path = self.paths[inode]

        def change() -> EntryAttributes:
            if fields.update_size:
                os.truncate(path, attr.st_size)
            if fields.update_mode:
                path.chmod(stat.S_IMODE(attr.st_mode))
            if fields.update_mtime or fields.update_atime:
                now = path.stat()
                atime = attr.st_atime_ns if fields.update_atime else now.st_atime_ns
                os.utime(path, ns=(atime, attr.st_mtime_ns))
            return self._attributes(path)

        return await self._do("setattr", change)

    async def mkdir(
        self, parent: InodeT, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        path = self._path(parent, name)
        await self._do("mkdir", lambda: path.mkdir(mode))
        return self._attributes(path)

    async def unlink(self, parent: InodeT, name: bytes, ctx: RequestContext) -> None:
        await self._do("unlink", self._path(parent, name).unlink)

    async def rename(
        self,
        parent_old: InodeT,
        name_old: bytes,
        parent_new: InodeT,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        old, new = self._path(parent_old, name_old), self._path(parent_new, name_new)
        inode = InodeT(old.lstat().st_ino)
        await self._do("rename", lambda: old.rename(new))
        self.paths[inode] = new

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> int:
        return inode

    async def readdir(self, fh: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        names: Sequence[str] = await self._do(
            "readdir", lambda: sorted(os.listdir(self.paths[InodeT(fh)]))
        )
        for number, name in enumerate(names[start:], start + 1):
            entry = self._attributes(self.paths[InodeT(fh)] / name)
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, number):
                return

    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        fd = await self._do("open", lambda: os.open(self.paths[inode], flags & ~os.O_CREAT))
        return FileInfo(fh=pyfuse3.FileHandleT(fd))

    async def create(
        self, parent: InodeT, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        path = self._path(parent, name)
        fd = await self._do("create", lambda: os.open(path, flags | os.O_CREAT, mode))
        return FileInfo(fh=pyfuse3.FileHandleT(fd)), self._attributes(path)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._do("read", lambda: os.pread(fh, size, off))

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._do("write", lambda: os.pwrite(fh, buf, off))

    async def flush(self, fh: int) -> None:
        raise FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        os.close(fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._do("fsync", lambda: os.fsync(fh))

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        found = os.statvfs(self.paths[pyfuse3.ROOT_INODE])
        data = pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail"):
            setattr(data, f"f_{name}", getattr(found, f"f_{name}"))
        data.f_namemax = 255
        return data


def main() -> None:
    source, mountpoint, rules = map(Path, sys.argv[1:])
    pyfuse3.init(Faulty(source, rules), str(mountpoint), {"fsname=faulty", "default_permissions"})
    print("mounted", flush=True)
    try:
        trio.run(pyfuse3.main, 1, 10_000)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
