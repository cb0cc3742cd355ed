"""Makes the odd system calls that KV connectors make, in a directory: one line for each result.

    probe_posix.py DIR

Compare the output on the mount with that on a native file system; "want" names the error that a
call must give. Needs only Python.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

M = 1 << 20
FALLOC_FL_KEEP_SIZE = 1
RENAME_NOREPLACE = 1
AT_FDCWD = -100
libc = ctypes.CDLL(None, use_errno=True)


def show(name: str, call: Callable[[], object]) -> None:
    try:
        result = call()
    except OSError as error:
        print(f"{name:46s} {errno.errorcode.get(error.errno or 0, error.errno)}")
    except Exception as error:  # noqa: BLE001  (a probe reports whatever it meets)
        print(f"{name:46s} {error!r}")
    else:
        print(f"{name:46s} OK {'' if result is None else result}".rstrip())


class Probe:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.memory = memoryview(mmap.mmap(-1, 9 * M))  # page-aligned, as O_DIRECT wants it

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def open(self, name: str, flags: int) -> int:
        return os.open(self.path(name), flags, 0o644)

    def write(self, name: str, flags: int, data: memoryview) -> int:
        descriptor = self.open(name, os.O_CREAT | os.O_WRONLY | flags)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        assert written == len(data), f"short write: {written}"
        return written

    def direct_after_open(self) -> None:
        descriptor = self.open("c", os.O_CREAT | os.O_RDWR)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, self.memory[:M], 0)
        os.close(descriptor)

    def map(self, flags: int, protection: int) -> bytes:
        descriptor = self.open("a", os.O_RDWR)
        mapped = mmap.mmap(descriptor, M, flags=flags, prot=protection)
        if protection & mmap.PROT_WRITE:
            mapped[:4] = b"KVFS"
        head = mapped[:4]
        mapped.close()
        os.close(descriptor)
        if flags & mmap.MAP_SHARED and protection & mmap.PROT_WRITE:
            read = Path(self.path("a")).read_bytes()[:4]
            assert read == b"KVFS", "what was written through the map is not visible to read()"
        return head

    def fallocate(self, mode: int) -> None:
        descriptor = self.open("f", os.O_CREAT | os.O_RDWR)
        result = libc.fallocate(descriptor, mode, ctypes.c_long(0), ctypes.c_long(M))
        code = ctypes.get_errno()
        os.close(descriptor)
        if result:
            raise OSError(code, "fallocate")

    def posix_fallocate(self) -> int:
        descriptor = self.open("g", os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(descriptor, 0, M)
        os.close(descriptor)
        return os.stat(self.path("g")).st_size

    def unlinked_while_open(self) -> tuple[bytes, int]:
        descriptor = self.open("u", os.O_CREAT | os.O_RDWR | os.O_EXCL)
        os.ftruncate(descriptor, 4 * M)
        os.unlink(self.path("u"))
        os.pwrite(descriptor, b"x" * 4096, 3 * M)
        result = os.pread(descriptor, 2, 3 * M), os.fstat(descriptor).st_size
        os.close(descriptor)
        return result

    def lock(self, flags: int, call: Callable[[int, int], object]) -> None:
        descriptor = self.open("a", flags)
        call(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)

    def sizes(self) -> tuple[int, int, int, int]:
        found = os.statvfs(self.directory)
        return found.f_bsize, found.f_frsize, found.f_blocks, found.f_bavail

    def symlink(self) -> str:
        os.symlink("../x", self.path("ln"))
        return os.readlink(self.path("ln"))

    def rename_full_directory(self) -> list[str]:
        os.makedirs(self.path("dir.tmp"))
        Path(self.path("dir.tmp/f")).touch()
        os.rename(self.path("dir.tmp"), self.path("dir"))
        return os.listdir(self.path("dir"))

    def rename_onto_full_directory(self) -> None:
        os.makedirs(self.path("dir.tmp"))
        os.rename(self.path("dir.tmp"), self.path("dir"))

    def rename_noreplace(self) -> None:
        source, target = os.fsencode(self.path("c")), os.fsencode(self.path("a"))
        if libc.renameat2(AT_FDCWD, source, AT_FDCWD, target, RENAME_NOREPLACE):
            raise OSError(ctypes.get_errno(), "renameat2")

    def fsync_file_and_directory(self) -> None:
        for path, flags in (
            (self.path("a"), os.O_RDWR),
            (str(self.directory), os.O_RDONLY | os.O_DIRECTORY),
        ):
            descriptor = os.open(path, flags)
            os.fsync(descriptor)
            os.close(descriptor)

    def birth_time(self) -> str:
        command = ["stat", "-c", "%w", self.path("a")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def close(self, name: str, flags: int) -> None:
        os.close(self.open(name, flags))

    def run(self) -> None:
        read, both = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
        private, shared = mmap.MAP_PRIVATE, mmap.MAP_SHARED
        direct = os.O_DIRECT
        memory = self.memory
        show(
            "O_DIRECT write 8MiB aligned, one write()",
            lambda: self.write("a", direct, memory[: 8 * M]),
        )
        show(
            "O_DIRECT write 8MiB+28, buffer off by 1",
            lambda: self.write("b", direct, memory[1 : 8 * M + 29]),
        )
        show("fcntl(F_SETFL, O_DIRECT) after open", self.direct_after_open)
        show("mmap MAP_PRIVATE PROT_READ", lambda: self.map(private, read))
        show(
            "mmap MAP_PRIVATE|POPULATE PROT_READ",
            lambda: self.map(private | mmap.MAP_POPULATE, read),
        )
        show("mmap MAP_SHARED PROT_READ", lambda: self.map(shared, read))
        show("mmap MAP_SHARED PROT_WRITE", lambda: self.map(shared, both))
        show("fallocate(0)", lambda: self.fallocate(0))
        show("fallocate(KEEP_SIZE)", lambda: self.fallocate(FALLOC_FL_KEEP_SIZE))
        show("posix_fallocate (glibc emulates)", self.posix_fallocate)
        show("ftruncate, unlink while open, pwrite/pread", self.unlinked_while_open)
        show(
            "O_TMPFILE",
            lambda: os.close(os.open(self.directory, os.O_TMPFILE | os.O_RDWR)),
        )
        show("O_NOATIME", lambda: self.close("a", os.O_RDONLY | os.O_NOATIME))
        show("flock", lambda: self.lock(os.O_RDONLY, fcntl.flock))
        show("lockf", lambda: self.lock(os.O_RDWR, fcntl.lockf))
        show("utime(now)", lambda: os.utime(self.path("a")))
        show("truncate(path)", lambda: os.truncate(self.path("a"), 4096))
        show("statvfs", self.sizes)
        show("symlink + readlink", self.symlink)
        show("rename non-empty dir", self.rename_full_directory)
        show("rename dir onto non-empty dir (want ENOTEMPTY)", self.rename_onto_full_directory)
        show("rename over existing file", lambda: os.replace(self.path("b"), self.path("a")))
        show("renameat2(NOREPLACE) onto existing (EEXIST)", self.rename_noreplace)
        show("hard link", lambda: os.link(self.path("a"), self.path("a2")))
        show("setxattr user.x", lambda: os.setxattr(self.path("a"), "user.x", b"1"))
        show("name of 255 bytes", lambda: Path(self.path("n" * 255)).touch())
        show(
            "name of 256 bytes (want ENAMETOOLONG)",
            lambda: Path(self.path("n" * 256)).touch(),
        )
        show("fsync file / dir", self.fsync_file_and_directory)
        show("statx btime present", self.birth_time)


if __name__ == "__main__":
    Probe(Path(sys.argv[1])).run()
