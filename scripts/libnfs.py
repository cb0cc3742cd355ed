"""An NFS client in this process: libnfs, through ctypes, for NFSv3 and NFSv4.0.

Contract: methods are named and raise as those of `os`; paths are below the export. A `File` of
NFSv3 is no more than a handle: it outlives restarts of the server, which are waited for. One thread
at a time may use a `Client`. Not for more than tests and benchmarks ask for.
"""

import ctypes
import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

SONAMES = ("libnfs.so.13", "libnfs.so.14")  # of one interface
TIMEOUT_MS = 60_000
READ_MOST = 1 << 20  # bytes at once
WRITE_MOST = {3: 1 << 20, 4: 2 << 10}  # bytes at once; libnfs 4.0's NFSv4 has a buffer of 4 KiB


class _Dirent(Structure):
    pass


_Dirent._fields_ = [
    ("next", POINTER(_Dirent)),
    ("name", c_char_p),
    ("inode", c_uint64),
    ("type", c_uint32),
    ("mode", c_uint32),
    ("size", c_uint64),
]
_STAT = [
    *("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"),
    *("atime", "mtime", "ctime"),
]


class _Stat(Structure):
    _fields_ = [(f"st_{name}", c_uint64) for name in _STAT] + [("rest", c_uint64 * 4)]


class Entry(NamedTuple):
    """Of a directory."""

    name: bytes
    inode: int
    size: int


def _load() -> Any:  # noqa: ANN401 - ctypes has no types for functions
    for name in SONAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        break
    else:
        raise RuntimeError(f"none of {', '.join(SONAMES)}: scripts/nfs-server.sh install")
    library.nfs_init_context.restype = c_void_p
    library.nfs_parse_url_full.restype = c_void_p
    library.nfs_get_error.restype = c_char_p
    library.nfs_readdir.restype = POINTER(_Dirent)
    return library


class Client(AbstractContextManager["Client"]):
    """Mounts `path` of the server on this machine at `port`, whose mountd is at the next one."""

    def __init__(self, port: int, path: Path, *, version: int = 3, uid: int = 0) -> None:
        self.version = version
        self._library = _load()
        self._context = c_void_p(self._library.nfs_init_context())
        url = (
            f"nfs://127.0.0.1{path}?version={version}&nfsport={port}&mountport={port + 1}"
            f"&uid={uid}&gid={uid}"
        )
        # By its own name the clients of one process and second would be one to the server.
        self._library.nfs4_set_client_name(self._context, f"kvfs-{uuid.uuid4()}".encode())
        parsed = self._library.nfs_parse_url_full(self._context, url.encode())
        assert parsed, self._error()
        self._library.nfs_set_timeout(self._context, TIMEOUT_MS)
        self._library.nfs_set_autoreconnect(self._context, -1)
        self.call("nfs_mount", b"127.0.0.1", os.fsencode(path))

    def close(self) -> None:
        """Also of one that is closed. While the server is away, it is waited for."""
        if self._context.value:
            self._library.nfs_destroy_context(self._context)
        self._context = c_void_p()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _error(self) -> str:
        return (self._library.nfs_get_error(self._context) or b"").decode(errors="replace")

    def call(self, name: str, *arguments: Any) -> int:  # noqa: ANN401 - ctypes'
        """One of libnfs's functions, whose first argument is the context. Raises OSError."""
        done: int = getattr(self._library, name)(self._context, *arguments)
        if done < 0:
            raise OSError(-done, f"{os.strerror(-done)}: {name}: {self._error()}")
        return done

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> "File":
        made = c_void_p()
        self.call("nfs_open2", _path(path), c_int(flags), c_int(mode), byref(made))
        return File(self, made)

    def read(self, path: str) -> bytes:
        """All of a file."""
        with self.open(path) as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file. libnfs's NFSv4 takes O_CREAT for O_EXCL."""
        try:
            made = self.open(path, os.O_WRONLY | os.O_TRUNC)
        except FileNotFoundError:
            made = self.open(path, os.O_WRONLY | os.O_CREAT)
        with made as file:
            file.write(data)

    def stat(self, path: str) -> _Stat:
        found = _Stat()
        self.call("nfs_stat64", _path(path), byref(found))
        return found

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        self.call("nfs_rename", _path(old), _path(new))

    def unlink(self, path: str) -> None:
        self.call("nfs_unlink", _path(path))

    def mkdir(self, path: str) -> None:
        self.call("nfs_mkdir", _path(path))

    def rmdir(self, path: str) -> None:
        self.call("nfs_rmdir", _path(path))

    def listdir(self, path: str = "") -> Iterator[Entry]:
        """Also `.` and `..`; all of it is read before the first one is given."""
        listing = c_void_p()
        self.call("nfs_opendir", _path(path), byref(listing))
        try:
            while entry := self._library.nfs_readdir(self._context, listing):
                found = entry.contents
                yield Entry(found.name, found.inode, found.size)
        finally:
            self._library.nfs_closedir(self._context, listing)


class File(AbstractContextManager["File"]):
    """An open file. `read` and `write` are whole: short answers are asked on."""

    def __init__(self, client: Client, handle: c_void_p) -> None:
        self._client = client
        self._handle = handle

    def stat(self) -> _Stat:
        found = _Stat()
        self._client.call("nfs_fstat64", self._handle, byref(found))
        return found

    def read(self, size: int = -1, offset: int = 0) -> bytes:
        """To its end, or so many bytes from an offset."""
        wanted = self.stat().st_size if size < 0 else size
        buffer = ctypes.create_string_buffer(wanted)
        got = self.read_into(buffer, offset)
        return buffer.raw[:got]

    def read_into(self, buffer: Any, offset: int = 0) -> int:  # noqa: ANN401 - an array of ctypes
        wanted, done = len(buffer), 0
        while done < wanted:
            got = self._client.call(
                *("nfs_pread", self._handle, c_uint64(offset + done)),
                *(c_uint64(min(wanted - done, READ_MOST)), byref(buffer, done)),
            )
            if not got:
                break
            done += got
        return done

    def write(self, data: bytes, offset: int = 0) -> None:
        done = 0
        while done < len(data):
            rest = data[done : done + WRITE_MOST[self._client.version]]
            done += self._client.call(
                *("nfs_pwrite", self._handle, c_uint64(offset + done), c_uint64(len(rest)), rest)
            )

    def sync(self) -> None:
        self._client.call("nfs_fsync", self._handle)

    def close(self) -> None:
        self._client.call("nfs_close", self._handle)

    def __exit__(self, *_: object) -> None:
        self.close()


def _path(path: str) -> bytes:
    return b"/" + path.encode()
