"""The catalog's keys and records as RocksDB stores them, for `kvfs fsck`.

Contract: each function decodes one pair of `Catalog.records`. It returns None for a pair that kvfs
cannot have written; no function raises. Not for use by the daemon: `Catalog` itself trusts its
records, and is faster.
"""

import stat
import struct

from kvfs.catalog import keys
from kvfs.catalog.inode import SPARSE_LENGTH, Inode
from kvfs.catalog.keys import TWO, U64, Dentry, Stored, number

_NAME_MAX = 255
_MODELS_MAX = (1 << 32) - 1  # an inode has 32 bits for it


def inode(key: bytes, record: bytes) -> Inode | None:
    """The inode of a record; None if packing it again gives other bytes."""
    ino = number(key)
    if ino is None:
        return None
    try:
        found = Inode.unpack(ino, record)
        good = found.pack() == record and len(found.digest) in {0, 16, SPARSE_LENGTH}
        if found.packed is not None:
            smaller = found.packed.size < found.size and found.digest != b""
            good = good and found.sealed and found.on_nvme and smaller
    except struct.error:
        return None
    # A type that no inode has is shown as "?".
    return found if good and stat.filemode(found.mode)[0] != "?" else None


def by_cookie(key: bytes, value: bytes) -> tuple[int, Dentry] | None:
    """(directory, entry) of a pair of COOKIES."""
    if len(key) != TWO.size or len(value) <= U64.size:
        return None
    parent, cookie = TWO.unpack(key)
    return parent, keys.by_cookie(cookie, value)


def by_name(key: bytes, value: bytes) -> tuple[int, Dentry] | None:
    """(directory, entry) of a pair of NAMES."""
    if len(key) <= U64.size or len(value) != TWO.size:
        return None
    return U64.unpack_from(key)[0], keys.by_name(key[U64.size :], value)


def publication(value: bytes) -> tuple[int, bytes] | None:
    """(directory, name) of a value of UNPUBLISHED."""
    name = _name(value[U64.size :])
    return (U64.unpack_from(value)[0], name) if name else None


def dropped(value: bytes) -> bytes | None:
    """The name of a value of DROPPED; empty if the name is not known."""
    return _name(value.removesuffix(keys.SWITCHED))


def _name(value: bytes) -> bytes | None:
    good = len(value) <= _NAME_MAX and b"/" not in value and b"\0" not in value
    return value if good else None


def model(key: bytes, value: bytes) -> int | None:
    """The number of a pair of MODELS, whose value is the engine, a zero and the model's name."""
    found = number(key)
    return found if found and found <= _MODELS_MAX and b"\0" in value else None


def stored(value: bytes) -> Stored | None:
    """The `Stored` of a value of STORED."""
    try:
        found = keys.stored(value)
    except ValueError:  # a UnicodeDecodeError is a ValueError
        return None
    return found if found.key else None


def deleted(value: bytes) -> str | None:
    """The key of a value of DELETED."""
    try:
        return value.decode() or None
    except UnicodeDecodeError:
        return None


def xattr(key: bytes) -> tuple[int, bytes] | None:
    """(inode, name) of a key of XATTRS."""
    return (U64.unpack_from(key)[0], key[U64.size :]) if len(key) > U64.size else None
