"""The catalog's keys, and the values that say which name is which inode.

Contract: pure. The functions trust the bytes that they decode (`audit` does not). A key is its
kind, one byte, and then the fields in this list.

Keys (integers big endian, so that they sort):

- i ino: the inode's record.
- d parent name: ino, cookie.
- c parent cookie: ino, name. It gives a directory in reading order.
- x ino name: an extended attribute.
- o ino: open for writing, or open without a name. If found at start, the file is unfinished.
- n ino: a namespace's settings, by its top-level directory.
- r ino: a dropped tree, that is, everything below this directory. The value is its old name.
- t ino: a tree to be accounted to the namespace of this directory.
- e ino: the directory of a block that is gone. kvfs deletes it with everything below it.
- p ino: a file without a name yet: the directory, and the name it gets when closed. Directory 0:
  kvfs cut the file off; then the value has the class of the error that says why.
- l model: engine and model, as file names have them.
- s ino: the object's key and facts in the bucket (Stored); perhaps of an older version.
- u ino: sealed, and not yet in the bucket as it is. The value is the time of the seal, ns.
- k ino: not in the bucket, because another node has its name there. The value is since when, ns.
- z number: a key to be deleted from the bucket. If a zero and an attempt follow: the key that this
  attempt may have made there; its outcome is unknown.
- g KEY: an object that lost this name of the pool, and when: its digest, its time of modification,
  and the time of the loss, both ns. See `core/pool/leaving`.
- y ino: another object has the name of this one in the pool: its digest, its time of modification
  (ns), the epoch of the index, and the key. See `core/pool/indexed`.
- q index: a request that was carried out, and the inode that it made or 0 (`Answers`).
- m name: facts about the whole: format, counter, session, changes (journal), ...
"""

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

# Format 1 had no places in inodes, 2 no bucket, 3 no packed copies, 4 no digests of sparse files.
# kvfs reads all of them, and raises the format with the first record that needs it.
FORMAT = 5
PLACED, BUCKETED, PACKED, HOLED = 2, 3, 4, 5  # the formats that added these

INODES, NAMES, COOKIES, XATTRS, MARKS = b"i", b"d", b"c", b"x", b"o"
SETTINGS, DROPPED, UNACCOUNTED, UNPUBLISHED, MODELS = b"n", b"r", b"t", b"p", b"l"
SWITCHED = b"/"  # behind the name in a value of DROPPED: a new version has taken the name
STORED, UNSTORED, DELETED = b"s", b"u", b"z"
CONTESTED = b"k"  # says nothing about the bucket's content: not one of those kinds
BUCKET_KINDS = (STORED, UNSTORED, DELETED)
GOING = b"e"
LEFT = b"g"
IN_CONFLICT = b"y"
ANSWERS, FACTS = b"q", b"m"
CHANGES = FACTS + b"changes"  # the number of the last change, which each change writes
UNJOURNALED = FACTS + b"unjournaled"  # the last change that the journal was not meant to have
BOOT = FACTS + b"boot"  # the mount of its file system on which the last session began

U64 = Struct(">Q")
TWO = Struct(">QQ")


class Stored(NamedTuple):
    """An object in the bucket. `digest` and `size` are of the stored bytes, see `codec`.

    attributes: its mode, owner and time there, as `Inode.attributes`; "": not known.
    """

    key: str
    etag: str
    size: int
    digest: bytes
    codec: str = "none"
    attributes: str = ""


class Dentry(NamedTuple):
    """A name in a directory. The cookie is its place in the directory's reading order."""

    name: bytes
    ino: int
    cookie: int


# The part of a key after its kind


number_key: Callable[[int], bytes] = U64.pack  # the key of an inode, or of its mark
LAST = (1 << 64) - 1  # greater than the number of any inode


def number(key: bytes) -> int | None:
    """The number in a key: the inode of an INODES key or a mark, the model of a MODELS key."""
    return U64.unpack(key)[0] if len(key) == U64.size else None


def name_key(parent: int, name: bytes) -> bytes:
    """The key of NAMES or XATTRS for a directory's entry or an inode's extended attribute."""
    return U64.pack(parent) + name


def cookie_key(parent: int, cookie: int) -> bytes:
    """The key by which an entry is listed."""
    return TWO.pack(parent, cookie)


# The values of an entry


def name_value(entry: Dentry) -> bytes:
    """The value of an entry under its `name_key`."""
    return TWO.pack(entry.ino, entry.cookie)


def by_name(name: bytes, value: bytes) -> Dentry:
    """The entry of this `name_value`."""
    return Dentry(name, *TWO.unpack(value))


def cookie_value(entry: Dentry) -> bytes:
    """The value of an entry under its `cookie_key`."""
    return U64.pack(entry.ino) + entry.name


def by_cookie(cookie: int, value: bytes) -> Dentry:
    """The entry of this `cookie_value`."""
    return Dentry(value[U64.size :], U64.unpack_from(value)[0], cookie)


# Values of STORED, about the bucket

_STORED = Struct(">Q16s")


def stored_value(stored: Stored) -> bytes:
    """The value of a key of STORED."""
    text = f"{stored.key}\0{stored.etag}\0{stored.codec}\0{stored.attributes}"
    return _STORED.pack(stored.size, stored.digest) + text.encode()


def stored(value: bytes) -> Stored:
    """The `Stored` of a `stored_value`. Raises ValueError for other bytes."""
    if len(value) < _STORED.size:
        raise ValueError(f"{len(value)} bytes, at least {_STORED.size} are expected")
    size, digest = _STORED.unpack_from(value)
    key, etag, codec, *told = value[_STORED.size :].decode().split("\0")
    if len(told) > 1:
        raise ValueError(f"{4 + len(told) - 1} texts, at most 4 are expected")
    return Stored(key, etag, size, digest, codec, *told)
