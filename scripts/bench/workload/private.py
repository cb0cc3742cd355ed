"""A directory that one client has for itself, with a model of all that must be seen in it.

Contract: each behaviour changes the directory and the model alike, by calls that must succeed.
After an exception the two may differ, and the directory is to be given up.
"""

import errno
import mmap
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.bench.workload.task import Calls, WrongError, expect

FILES = 24  # so many a client keeps, more or less
HELD = 4
SIZES = (0, 1, 100, 4096, 4097, 20_000, 65_536)
LARGE = 1_500_000
LONG_AGO = 10**18  # ns; times that are set are around it


@dataclass(eq=False)
class File:
    """The expected state of one inode."""

    content: bytearray
    mode: int = 0o640
    names: set[str] = field(default_factory=set)
    attributes: dict[str, bytes] = field(default_factory=dict)
    changed: int | None = None  # st_mtime_ns, as far as it was set

    def put(self, offset: int, data: bytes) -> None:
        if data:
            self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
            self.content[offset : offset + len(data)] = data
            self.changed = None

    def resize(self, size: int) -> None:
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))
        self.changed = None


@dataclass(eq=False)
class Held:
    """A descriptor that stays open over many other calls."""

    fd: int
    file: File
    path: str
    append: bool


class Private:
    """`rng` decides everything."""

    def __init__(self, folder: str, calls: Calls, rng: random.Random) -> None:
        self.folder = folder
        self.calls = calls
        self.rng = rng
        self.names: dict[str, File] = {}
        self.held: list[Held] = []
        self.directories: set[str] = set()
        self._count = 0
        calls.mkdir(folder)
        self.behaviours: dict[Callable[[], None], int] = {
            self.create: 8,
            self.replace: 6,
            self.rewrite: 4,
            self.rewrite_all: 4,
            self.append: 4,
            self.resize: 2,
            self.read: 8,
            self.map_read: 3,
            self.map_write: 3,
            self.unlink: 2,
            self.unlink_open: 2,
            self.link: 3,
            self.rename: 3,
            self.make_directory: 1,
            self.set_attribute: 2,
            self.change_mode: 2,
            self.set_time: 2,
            self.hold: 5,
            self.use_held: 10,
            self.let_go: 4,
            self.look_for_nothing: 1,
            self.verify: 1,
        }

    # The files for a step

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._count}.{self.rng.choice(['kv', 'pt', 'bin'])}"

    def _some(self) -> tuple[str, File]:
        if not self.names:
            self.create()
        return self.rng.choice(list(self.names.items()))

    def _data(self) -> bytes:
        size = LARGE if self.rng.random() < 0.05 else self.rng.choice(SIZES)  # noqa: PLR2004
        return self.rng.randbytes(self.rng.randint(size // 2, size))

    def _write(self, fd: int, data: bytes, path: str) -> None:
        """In one call or in several, with or without fsync."""
        pieces = self.rng.choice([1, 1, 3])
        step = len(data) // pieces + 1
        for start in range(0, max(1, len(data)), step):
            self.calls.write_all(fd, data[start : start + step], path)
        if self.rng.random() < 0.1:  # noqa: PLR2004
            self.rng.choice([self.calls.fsync, self.calls.fdatasync])(fd)

    def _written(self, name: str, data: bytes) -> File:
        path = self._path(name)
        fd = self.calls.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
        self._write(fd, data, path)
        self.calls.close(fd)
        return File(bytearray(data))

    def _name(self, name: str, file: File) -> None:
        """Do a rename or link in the model: the file that had the name loses it."""
        self._forget(name)
        self.names[name] = file
        file.names.add(name)

    def _forget(self, name: str) -> None:
        old = self.names.pop(name, None)
        if old is not None:
            old.names.discard(name)

    # Content

    def create(self) -> None:
        if len(self.names) >= FILES:
            self.unlink()
        name = self._new_name()
        self._name(name, self._written(name, self._data()))

    def replace(self) -> None:
        name, _ = self._some()
        file = self._written(f"{name}.tmp", self._data())
        self.calls.rename(self._path(f"{name}.tmp"), self._path(name))
        self._name(name, file)

    def rewrite(self) -> None:
        name, file = self._some()
        offset, data = self.rng.randint(0, len(file.content)), self._data()
        fd = self.calls.open(self._path(name), os.O_RDWR)
        self.calls.write_all(fd, data, name, offset)
        file.put(offset, data)
        expect(name, "content while it is written", self.calls.contents(fd), file.content)
        self.calls.close(fd)

    def rewrite_all(self) -> None:
        name, file = self._some()
        data = self._data()
        fd = self.calls.open(self._path(name), os.O_WRONLY | os.O_TRUNC)
        self._write(fd, data, name)
        self.calls.close(fd)
        file.resize(0)
        file.put(0, data)

    def append(self) -> None:
        name, file = self._some()
        fd = self.calls.open(self._path(name), os.O_WRONLY | os.O_APPEND)
        for _ in range(self.rng.randint(1, 3)):
            data = self.rng.randbytes(self.rng.randint(1, 300))
            self.calls.write_all(fd, data, name)
            file.put(len(file.content), data)
        self.calls.close(fd)

    def resize(self) -> None:
        name, file = self._some()
        size = self.rng.randint(0, len(file.content) + 5000)
        self.calls.truncate(self._path(name), size)
        file.resize(size)

    def read(self) -> None:
        name, file = self._some()
        expect(name, "content", self.calls.read_all(self._path(name)), file.content)

    def map_read(self) -> None:
        name, file = self._some()
        if not file.content:
            return
        fd = self.calls.open(self._path(name), os.O_RDONLY)
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
            self.calls.close(fd)
            found = self.calls.timed("mmap read", lambda: mapped[:])
        expect(name, "content as mapped", found, file.content)

    def map_write(self) -> None:
        name, file = self._some()
        if not file.content:
            return
        fd = self.calls.open(self._path(name), os.O_RDWR)
        offset = self.rng.randrange(len(file.content))
        data = self._data()[: len(file.content) - offset]
        with mmap.mmap(fd, 0) as mapped:

            def write() -> None:
                mapped[offset : offset + len(data)] = data

            self.calls.timed("mmap write", write)
            if self.rng.random() < 0.5:  # noqa: PLR2004
                self.calls.timed("msync", mapped.flush)
        file.put(offset, data)
        file.changed = None
        expect(name, "content after mmap", self.calls.contents(fd), file.content)
        self.calls.close(fd)

    # Names

    def unlink(self) -> None:
        name, _ = self._some()
        self.calls.unlink(self._path(name))
        self._forget(name)

    def unlink_open(self) -> None:
        name, file = self._some()
        fd = self.calls.open(self._path(name), os.O_RDWR)
        self.calls.unlink(self._path(name))
        self._forget(name)
        expect(name, "links after unlink", self.calls.fstat(fd).st_nlink, len(file.names))
        expect(name, "content after unlink", self.calls.contents(fd), file.content)
        data = self._data()
        self.calls.write_all(fd, data, name, len(file.content))
        file.put(len(file.content), data)
        expect(name, "content written after unlink", self.calls.contents(fd), file.content)
        self.calls.close(fd)

    def link(self) -> None:
        name, file = self._some()
        new = self._new_name()
        self.calls.link(self._path(name), self._path(new))
        self._name(new, file)

    def rename(self) -> None:
        name, file = self._some()
        over, other = self._some()
        new = over if self.rng.random() < 0.5 else self._new_name()  # noqa: PLR2004
        self.calls.rename(self._path(name), self._path(new))
        if new == over and other is file:
            return  # two names of one file: both stay
        self._forget(name)
        self._name(new, file)

    def make_directory(self) -> None:
        """A directory with one file comes and goes, or stays and goes another time."""
        if self.directories and self.rng.random() < 0.5:  # noqa: PLR2004
            self._remove_directory(self.directories.pop())
            return
        name = f"{self._new_name()}.d"
        path = self._path(name)
        self.calls.mkdir(path)
        self.directories.add(name)
        data = self._data()
        fd = self.calls.open(f"{path}/inside", os.O_CREAT | os.O_WRONLY, 0o600)
        self._write(fd, data, path)
        self.calls.close(fd)
        expect(path, "listing", self.calls.listdir(path), ["inside"])
        expect(path, "content of its file", self.calls.read_all(f"{path}/inside"), data)

    def _remove_directory(self, name: str) -> None:
        path = self._path(name)
        try:
            self.calls.rmdir(path)
        except OSError as error:
            expect(path, "rmdir of a full directory", error.errno, errno.ENOTEMPTY)
        else:
            raise WrongError("wrong", path, "rmdir removed a directory with a file in it")
        self.calls.rename(f"{path}/inside", f"{path}/out")
        self.calls.unlink(f"{path}/out")
        self.calls.rmdir(path)

    def look_for_nothing(self) -> None:
        path = self._path("nothing")
        try:
            self.calls.stat(path)
        except FileNotFoundError:
            return
        raise WrongError("wrong", path, "it is there, and nobody made it")

    # Attributes

    def set_attribute(self) -> None:
        name, file = self._some()
        key = self.rng.choice(["user.one", "user.two"])
        if key in file.attributes and self.rng.random() < 0.5:  # noqa: PLR2004
            self.calls.removexattr(self._path(name), key)
            del file.attributes[key]
        else:
            value = self.rng.randbytes(20)
            self.calls.setxattr(self._path(name), key, value)
            file.attributes[key] = value

    def change_mode(self) -> None:
        name, file = self._some()
        file.mode = self.rng.choice([0o600, 0o640, 0o644, 0o755])
        self.calls.chmod(self._path(name), file.mode)
        self._check(name, file)

    def set_time(self) -> None:
        name, file = self._some()
        changed = LONG_AGO + self.rng.randrange(10**12)
        self.calls.utime(self._path(name), ns=(changed, changed))
        file.changed = changed
        self._check(name, file)

    # Descriptors that stay open

    def hold(self) -> None:
        if len(self.held) >= HELD:
            self.let_go()
        name, file = self._some()
        append = self.rng.random() < 0.3  # noqa: PLR2004
        flags = os.O_RDWR | (os.O_APPEND if append else 0)
        fd = self.calls.open(self._path(name), flags)
        self.held.append(Held(fd, file, name, append))

    def use_held(self) -> None:
        if not self.held:
            return
        held = self.rng.choice(self.held)
        if self.rng.random() < 0.4:  # noqa: PLR2004
            data = self._data()
            at = self.rng.randint(0, len(held.file.content))
            if held.append:
                self.calls.write_all(held.fd, data, held.path)
                held.file.put(len(held.file.content), data)
            else:
                self.calls.write_all(held.fd, data, held.path, at)
                held.file.put(at, data)
        found = self.calls.fstat(held.fd)
        expect(held.path, "size by descriptor", found.st_size, len(held.file.content))
        expect(held.path, "links by descriptor", found.st_nlink, len(held.file.names))
        expect(held.path, "content by descriptor", self.calls.contents(held.fd), held.file.content)

    def let_go(self) -> None:
        if self.held:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            self.calls.close(held.fd)

    # Everything

    def _check(self, name: str, file: File) -> None:
        found = self.calls.stat(self._path(name))
        expect(name, "mode", oct(found.st_mode), oct(stat.S_IFREG | file.mode))
        expect(name, "size", found.st_size, len(file.content))
        expect(name, "links", found.st_nlink, len(file.names))
        if file.changed is not None:
            expect(name, "time", found.st_mtime_ns, file.changed)

    def verify(self) -> None:
        listed = sorted(self.calls.listdir(self.folder))
        expect(self.folder, "listing", listed, sorted([*self.names, *self.directories]))
        for name, file in self.names.items():
            path = self._path(name)
            self._check(name, file)
            attributes = {key: self.calls.getxattr(path, key) for key in self.calls.listxattr(path)}
            expect(name, "attributes", attributes, file.attributes)
            expect(name, "content", self.calls.read_all(path), file.content)

    def finish(self) -> None:
        while self.held:
            self.let_go()
        self.verify()
