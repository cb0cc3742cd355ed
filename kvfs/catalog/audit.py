"""The catalog's keys and records as they are stored, for whoever doubts them.

Contract: each function decodes one pair of `Catalog.records` and gives None for what kvfs cannot
have written; nothing raises. Not for use: `Catalog` itself trusts its records, and is faster.
"""

import stat
import struct

from kvfs.catalog.catalog import Dentry
from kvfs.catalog.inode import Inode

INODES, NAMES, COOKIES, XATTRS, MARKS = b"i", b"d", b"c", b"x", b"o"
SETTINGS, DROPPED, UNACCOUNTED, UNPUBLISHED, MODELS = b"n", b"r", b"t", b"p", b"l"

NAME_MAX = 255
_MODELS_MAX = (1 << 32) - 1  # an inode has 32 bits for it
_U64 = struct.Struct(">Q")
_TWO = struct.Struct(">QQ")


def number_key(ino: int) -> bytes:
    """The key of an inode, or of its mark."""
    return _U64.pack(ino)


def name_key(parent: int, name: bytes) -> bytes:
    """The key by which an entry is looked up."""
    return _U64.pack(parent) + name


def cookie_key(parent: int, cookie: int) -> bytes:
    """The key by which an entry is listed."""
    return _TWO.pack(parent, cookie)


def number(key: bytes) -> int | None:
    """The inode that a key of INODES, or of a mark, is about; the model that one of MODELS is."""
    return _U64.unpack(key)[0] if len(key) == _U64.size else None


def inode(key: bytes, record: bytes) -> Inode | None:
    """A record that would be written otherwise than it was read is none of ours."""
    ino = number(key)
    if ino is None:
        return None
    try:
        found = Inode.unpack(ino, record)
        good = found.pack() == record and len(found.digest) in {0, 16}
    except struct.error:
        return None
    return found if good and stat.S_IFMT(found.mode) in _TYPES else None


_TYPES = {
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFCHR,
    stat.S_IFBLK,
}


def by_cookie(key: bytes, value: bytes) -> tuple[int, Dentry] | None:
    """(directory, entry) of a pair of COOKIES."""
    if len(key) != _TWO.size or len(value) <= _U64.size:
        return None
    parent, cookie = _TWO.unpack(key)
    return parent, Dentry(value[_U64.size :], _U64.unpack_from(value)[0], cookie)


def by_name(key: bytes, value: bytes) -> tuple[int, Dentry] | None:
    """(directory, entry) of a pair of NAMES."""
    if len(key) <= _U64.size or len(value) != _TWO.size:
        return None
    return _U64.unpack_from(key)[0], Dentry(key[_U64.size :], *_TWO.unpack(value))


def publication(value: bytes) -> tuple[int, bytes] | None:
    """(directory, name) of a value of UNPUBLISHED."""
    name = dropped(value[_U64.size :])
    return (_U64.unpack_from(value)[0], name) if name else None


def dropped(value: bytes) -> bytes | None:
    """The name of a value of DROPPED, empty where it is not known."""
    good = len(value) <= NAME_MAX and b"/" not in value and b"\0" not in value
    return value if good else None


def model(key: bytes, value: bytes) -> int | None:
    """The number of a pair of MODELS, whose value is the engine, a zero and the model's name."""
    found = number(key)
    return found if found and found <= _MODELS_MAX and b"\0" in value else None


def xattr(key: bytes) -> tuple[int, bytes] | None:
    """(inode, name) of a key of XATTRS."""
    return (_U64.unpack_from(key)[0], key[_U64.size :]) if len(key) > _U64.size else None
