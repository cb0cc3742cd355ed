"""Two directories that must not differ: one on kvfs, one on this machine's disk.

Contract: `Twins.both` makes one call on either side and fails if results or errnos differ.
`Twins.compare` fails on any difference that the trees or the open descriptors show. Every access is
by system calls, as a program's is.

File systems may differ in these points, so they are not compared: inode numbers (but which names
share one), sizes and blocks of directories, st_blocks, and the order of listings. Times are not
compared if no call has set them, or if a write through a mapping may have changed them: a tmpfs
changes none, a disk some.
"""

import ctypes
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tests.semantics.syscalls import libc

ANCIENT = 1_000_000_000 * 10**9  # ns; a time before this (2001) is one that a test has set
KVFS, DISK = 0, 1

Seen: TypeAlias = dict[str, object]


@dataclass(eq=False)
class Descriptor:
    """One open file, on either side."""

    fds: tuple[int, int]
    path: str
    append: bool  # as it was opened

    def __repr__(self) -> str:
        return f"<{self.path} as {self.fds[KVFS]}>"


@dataclass(eq=False)
class Mapping:
    """One shared mapping on either side, without a descriptor of kvfs.

    `guard` is a descriptor of the file on disk, because only the file's size tells how far the
    mapping may be touched. `inodes` are the inode numbers.
    """

    addresses: tuple[int, int]
    length: int
    guard: int
    inodes: tuple[int, int]

    def touchable(self) -> int:
        return min(self.length, os.fstat(self.guard).st_size)


@dataclass(eq=False)
class Twins:
    roots: tuple[Path, Path]
    descriptors: list[Descriptor] = field(default_factory=list)
    mappings: list[Mapping] = field(default_factory=list)
    # Inodes that were written through a mapping, and descriptors of those on disk, which would give
    # their numbers to new files; kvfs uses none twice.
    poked: set[int] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    began: int = field(default_factory=time.time_ns)

    # Calls

    def both(self, what: str, call: Callable[[int, Path], Any]) -> Any:  # noqa: ANN401 (call's)
        """Make the call on each side. None if it failed, on both and alike."""
        found = [_outcome(partial(call, side, self.roots[side])) for side in (KVFS, DISK)]
        assert found[KVFS] == found[DISK], f"{what}: {_different(found[KVFS], found[DISK])}"
        return found[KVFS][1]

    def opened(
        self, path: str, flags: int, mode: int, *, by: Descriptor | None
    ) -> Descriptor | None:
        """Open a path, or the file of a descriptor once more."""
        fds = []

        def call(side: int, root: Path) -> None:
            where = root / path if by is None else f"/proc/self/fd/{by.fds[side]}"
            fds.append(os.open(where, flags, mode))

        try:
            self.both(f"open {path} with {flags:#o}", call)
        except AssertionError:
            for fd in fds:
                os.close(fd)
            raise
        return self.adopt(fds, path, append=bool(flags & os.O_APPEND)) if fds else None

    def adopt(self, fds: list[int], path: str, *, append: bool) -> Descriptor:
        self.descriptors.append(Descriptor((fds[KVFS], fds[DISK]), path, append))
        return self.descriptors[-1]

    def close(self, descriptor: Descriptor) -> None:
        self.descriptors.remove(descriptor)
        self.both(f"close {descriptor}", lambda side, _: os.close(descriptor.fds[side]))

    def map(self, descriptor: Descriptor, protection: int) -> Mapping | None:
        length = os.fstat(descriptor.fds[DISK]).st_size
        if not length or not stat.S_ISREG(os.fstat(descriptor.fds[DISK]).st_mode):
            return None
        found = []

        def call(side: int, _: Path) -> None:
            fd = descriptor.fds[side]
            address = libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, 0)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap")
            found.append(address)

        self.both(f"map {descriptor}", call)
        if not found:
            return None
        guard = os.dup(descriptor.fds[DISK])
        kvfs, disk = (os.fstat(fd).st_ino for fd in descriptor.fds)
        self.mappings.append(Mapping((found[KVFS], found[DISK]), length, guard, (kvfs, disk)))
        return self.mappings[-1]

    def poke(self, mapping: Mapping, offset: int, data: bytes, *, sync: bool) -> None:
        """Write through a mapping, as far as the file goes."""
        data = data[: max(0, mapping.touchable() - offset)]
        if mapping.inodes[DISK] not in self.poked:
            self.kept.append(os.dup(mapping.guard))
        self.poked.update(mapping.inodes)
        for address in mapping.addresses:
            ctypes.memmove(address + offset, data, len(data))
            if sync:
                libc.msync(address, mapping.length, 4)  # MS_SYNC

    def unmap(self, mapping: Mapping) -> None:
        self.mappings.remove(mapping)
        for address in mapping.addresses:
            libc.munmap(address, mapping.length)
        os.close(mapping.guard)

    def let_go(self) -> None:
        """Close and unmap everything."""
        for descriptor in list(self.descriptors):
            self.close(descriptor)
        for mapping in list(self.mappings):
            self.unmap(mapping)

    def end(self) -> None:
        """Stop comparing."""
        for fd in self.kept:
            os.close(fd)
        self.kept.clear()

    # Looking

    def compare(self) -> None:
        for number, descriptor in enumerate(self.descriptors):
            self.both(f"descriptor {number}, {descriptor}", partial(self._held, descriptor))
        for number, mapping in enumerate(self.mappings):
            size = mapping.touchable()
            self.both(
                f"mapping {number}",
                lambda side, _: ctypes.string_at(mapping.addresses[side], size),  # noqa: B023
            )
        kvfs, disk = (self.tree(root) for root in self.roots)
        assert kvfs.keys() == disk.keys(), (sorted(kvfs), sorted(disk))
        for path, expected in disk.items():
            assert kvfs[path] == expected, f"{path}: {_difference(kvfs[path], expected)}"

    def _held(self, descriptor: Descriptor, side: int, _: Path) -> Seen:
        fd = descriptor.fds[side]
        found = os.fstat(fd)
        seen = self._attributes(found)
        if stat.S_ISREG(found.st_mode):
            seen["offset"] = os.lseek(fd, 0, os.SEEK_CUR)
            seen["read"] = _outcome(lambda: os.pread(fd, found.st_size + 1, 0))
            seen["xattrs"] = _xattrs(fd)
        return seen

    def tree(self, root: Path) -> dict[str, Seen]:
        """Everything below a directory, by path."""
        found: dict[str, Seen] = {".": self._entry(root)}
        first: dict[int, str] = {}

        def walk(directory: Path) -> None:
            with os.scandir(directory) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
            for entry in entries:
                path = Path(entry.path)
                name = str(path.relative_to(root))
                assert name not in found, f"{name} is listed twice"
                seen = found[name] = self._entry(path)
                ino = entry.inode()
                assert ino == path.lstat().st_ino, f"{name}: inode number as listed and as found"
                seen["same as"] = first.setdefault(ino, name)
                seen["listed as"] = (entry.is_dir(follow_symlinks=False), entry.is_symlink())
                if entry.is_dir(follow_symlinks=False):
                    walk(path)

        walk(root)
        return found

    def _entry(self, path: Path) -> Seen:
        found = path.lstat()
        seen = self._attributes(found)
        if stat.S_ISLNK(found.st_mode):
            seen["target"] = os.readlink(path)
        else:
            seen["xattrs"] = _xattrs(path)
        if stat.S_ISREG(found.st_mode):
            seen["content"] = path.read_bytes()
        return seen

    def _attributes(self, found: os.stat_result) -> Seen:
        changed = found.st_mtime_ns
        set_by_call = changed < ANCIENT
        now = time.time_ns()
        if found.st_ino in self.poked:
            changed, set_by_call = 0, True
        if stat.S_ISFIFO(found.st_mode):
            changed, set_by_call = 0, True  # Linux sets it when a fifo on a disk is written to
        assert set_by_call or self.began - 10**9 < changed <= now + 10**9, (
            f"mtime {changed} at {now}"
        )
        return {
            "mode": oct(found.st_mode),
            "links": found.st_nlink,
            "owner": (found.st_uid, found.st_gid),
            "size": None if stat.S_ISDIR(found.st_mode) else found.st_size,
            "changed": changed if set_by_call else "by itself",
        }


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "ok", call()
    except OSError as error:
        return errno.errorcode[error.errno or 0], None


def _xattrs(of: int | Path) -> dict[str, bytes]:
    return {name: os.getxattr(of, name) for name in os.listxattr(of) if name.startswith("user.")}


def _different(kvfs: tuple[str, Any], expected: tuple[str, Any]) -> str:
    if kvfs[0] == expected[0] and isinstance(kvfs[1], dict):
        return _difference(kvfs[1], expected[1])
    return f"kvfs {_short(kvfs)}, expected {_short(expected)}"


def _difference(kvfs: Seen, expected: Seen) -> str:
    parts = (
        f"{key} is {_short(kvfs.get(key))}, expected {_short(value)}{_where(kvfs.get(key), value)}"
        for key, value in expected.items()
        if kvfs.get(key) != value
    )
    return "; ".join(parts)


def _where(found: object, expected: object) -> str:
    """The offset at which bytes, or those of two outcomes, begin to differ."""
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return _where(found[1], expected[1])
    if not isinstance(found, bytes) or not isinstance(expected, bytes):
        return ""
    at = next(
        (at for at, pair in enumerate(zip(found, expected, strict=False)) if len(set(pair)) > 1),
        None,
    )
    return f" ({len(found)} and {len(expected)} bytes, which differ from {at} on)"


def _short(value: object) -> str:
    if isinstance(value, bytes) and len(value) > 40:
        return f"{value[:20]!r}... of {len(value)} bytes"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    return repr(value)
