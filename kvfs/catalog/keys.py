"""The catalog's keys, and the values that say which name is which inode.

Contract: pure; what is encoded here is decoded here, and trusted (who doubts it: `audit`). A key is
its kind, one byte, and what follows it in the table.

Keys (integers big endian, so that they sort):
  i ino              the inode's record
  d parent name      ino, cookie
  c parent cookie    ino, name: the directory in reading order
  x ino name         an extended attribute
  o ino              open for writing, or open without a name: unfinished if found at start
  n ino              a namespace's settings, by its top-level directory
  r ino              a tree that was dropped, everything below this directory: the name it had
  t ino              a tree that is to be accounted to the namespace of this directory
  e ino              a block's directory whose block is gone: it goes, with all below it
  p ino              a file without a name yet: the directory, and the name it gets when closed;
                     directory 0: it was cut off, and the class of the error that says why
  l model            engine and model, as names of files say them
  s ino              what the bucket has of it, and where (Stored): perhaps an older version
  u ino              sealed, and not yet in the bucket as it is: when that was, ns
  k ino              not in the bucket, since another node has its name there: since when, ns
  z number           a key that is to be deleted from the bucket; if a zero and an attempt follow,
                     what that has made there, of which nobody knows whether it has
  q index            a request that was carried out, and the inode that it made or 0 (`Answers`)
  m name             facts about the whole: format, counter, session, changes (journal), ...
"""

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

# 1 had no places in inodes, 2 no bucket, 3 no packed copies, 4 no digests of sparse files; all are
# read, and become what is first written to them.
FORMAT = 5
PLACED, BUCKETED, PACKED, HOLED = 2, 3, 4, 5  # the formats that brought those

INODES, NAMES, COOKIES, XATTRS, MARKS = b"i", b"d", b"c", b"x", b"o"
SETTINGS, DROPPED, UNACCOUNTED, UNPUBLISHED, MODELS = b"n", b"r", b"t", b"p", b"l"
STORED, UNSTORED, DELETED = b"s", b"u", b"z"
CONTESTED = b"k"  # says nothing of what is in a bucket: of no kind of those
BUCKET_KINDS = (STORED, UNSTORED, DELETED)
GOING = b"e"
ANSWERS, FACTS = b"q", b"m"
CHANGES = FACTS + b"changes"  # the number of the last change, which each change writes
UNJOURNALED = FACTS + b"unjournaled"  # that of the last change that the journal was not to have
BOOT = FACTS + b"boot"  # on which mount of its file system the last session began

U64 = Struct(">Q")
TWO = Struct(">QQ")


class Stored(NamedTuple):
    """An object in the bucket. `digest` and `size` are of what is stored, see `codec`.

    told: what it says of its mode, owner and time, as `Inode.told`; "": that is not known.
    """

    key: str
    etag: str
    size: int
    digest: bytes
    codec: str = "none"
    told: str = ""


class Dentry(NamedTuple):
    """A name in a directory. The cookie is its place in the directory's reading order."""

    name: bytes
    ino: int
    cookie: int


# What follows the kind


number_key: Callable[[int], bytes] = U64.pack  # the key of an inode, or of its mark


def number(key: bytes) -> int | None:
    """The inode that a key of INODES, or of a mark, is about; the model that one of MODELS is."""
    return U64.unpack(key)[0] if len(key) == U64.size else None


def name_key(parent: int, name: bytes) -> bytes:
    """The key by which an entry is looked up, or an inode's extended attribute."""
    return U64.pack(parent) + name


def cookie_key(parent: int, cookie: int) -> bytes:
    """The key by which an entry is listed."""
    return TWO.pack(parent, cookie)


# The values of an entry


def name_value(entry: Dentry) -> bytes:
    """What stands under its `name_key`."""
    return TWO.pack(entry.ino, entry.cookie)


def by_name(name: bytes, value: bytes) -> Dentry:
    """The entry of this `name_value`."""
    return Dentry(name, *TWO.unpack(value))


def cookie_value(entry: Dentry) -> bytes:
    """What stands under its `cookie_key`."""
    return U64.pack(entry.ino) + entry.name


def by_cookie(cookie: int, value: bytes) -> Dentry:
    """The entry of this `cookie_value`."""
    return Dentry(value[U64.size :], U64.unpack_from(value)[0], cookie)


# What is in a bucket

_STORED = Struct(">Q16s")


def stored_value(stored: Stored) -> bytes:
    """What stands under a key of STORED."""
    text = f"{stored.key}\0{stored.etag}\0{stored.codec}\0{stored.told}"
    return _STORED.pack(stored.size, stored.digest) + text.encode()


def stored(value: bytes) -> Stored:
    """What this `stored_value` says. Raises ValueError for what is none."""
    if len(value) < _STORED.size:
        raise ValueError(f"{len(value)} bytes, at least {_STORED.size} are expected")
    size, digest = _STORED.unpack_from(value)
    key, etag, codec, *told = value[_STORED.size :].decode().split("\0")
    if len(told) > 1:
        raise ValueError(f"{4 + len(told) - 1} texts, at most 4 are expected")
    return Stored(key, etag, size, digest, codec, *told)
