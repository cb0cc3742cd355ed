"""The inode: one record of the catalog, and its bytes.

A record says what an object is and where its copies are. It has no derived facts: not a file's link
count, nor whether a copy in RAM survived, nor how full a tier is. Not for names: a dentry holds a
name, and `Inode.links` only says which dentries there are.

Record format 2, little endian: the fixed part `_FIXED`, `_PLACE` if its flag is set, then `links`
pairs of (parent, cookie), then the rest: `target`. Format 1 had no places: its inodes are in the
mount's own namespace, and their names say nothing. Format 3 has one more flag. Format 4 has another
flag; if it is set, `_PACKED` and a codec's name come before the links. Format 5 has digests of
sparse files, told by their length: the record has their last 16 bytes.
The flag of remote objects (`in_pool`) needs no format: an older kvfs drops them as lost.
"""

import stat
from dataclasses import dataclass
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

ROOT_INO = 1  # FUSE_ROOT_ID
LINK_MAX = 1000  # names one file may have; each costs 16 bytes in every write of its record

_FIXED = Struct("<IIIIQqqqqQQIIIBB16sH")
_PLACE = Struct("<QQQI")
_PAIR = Struct("<QQ")
_PACKED = Struct("<QQ16sB")
_SEALED, _ON_NVME, _PLACED, _KEPT, _IN_BUCKET, _IS_PACKED, _IN_POOL = 1, 2, 4, 8, 16, 32, 64

SPARSE = b"s"  # before the 16 bytes of a digest of nonzero blocks: `movement/files.py`
SPARSE_LENGTH = 17
SPARSE_LEAST = 1 << 20  # bytes; for smaller files holes do not matter


class PackedCopy(NamedTuple):
    """A compressed copy: a file of `size` bytes, which have the xxh3-128 `digest`.

    blocks: units of 512 bytes that the copy takes. A compressed copy is smaller than the object;
    the size of a file tells which of the two it is.
    """

    codec: str
    size: int
    blocks: int
    digest: bytes


@dataclass(slots=True)
class Inode:
    """One file, directory, link or device node. The order of the fields is that of the record.

    Times are nanoseconds since the epoch, `size` is bytes, `blocks` units of 512 bytes.
    """

    ino: int
    mode: int
    uid: int
    gid: int
    subdirs: int = 0
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    backing_mtime_ns: int = 0  # of every copy: with size, the signature of untouched bytes
    blocks: int = 0
    rdev: int = 0
    version: int = 0  # of the content; backing files carry it in their names
    session: int = 0  # mount session in which this version was sealed
    ram_epoch: int = 0  # the life of the RAM tier that holds a copy; 0: no copy there
    sealed: bool = False  # False: being written, or torn by a crash
    on_nvme: bool = False
    digest: bytes = b""  # xxh3-128 of the content, empty until computed; see `sparse`
    # (parent inode, cookie) of each dentry. A directory has one, with the parent of its `..`. An
    # unlinked file that is still open has none.
    links: tuple[tuple[int, int], ...] = ()
    target: bytes = b""  # of a symbolic link; of a block's file in a prefix path, its shard
    # The namespace that it is accounted to, and facts that its name gave when it was named
    # (layouts): its group, the group before that in its prompt (0: not known), the model.
    namespace: int = ROOT_INO
    key: int = 0
    parent_key: int = 0
    model: int = 0
    unevictable: bool = False  # only its owner unlinks it
    in_bucket: bool = False  # this version is in the bucket as well, or only there
    in_pool: bool = False  # other nodes of the pool have this version, and no tier here
    packed: PackedCopy | None = None  # its copy on NVMe; `blocks` are those of all other copies

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def mostly_holes(self) -> bool:
        """Whether less than half of it is data."""
        return self.size > SPARSE_LEAST and self.blocks * 512 < self.size // 2

    @property
    def sparse(self) -> bool:
        """Whether its digest is of its nonzero blocks only: SPARSE and their xxh3-128.

        A computed digest stays of its kind, however many blocks copies take later.
        """
        return len(self.digest) == SPARSE_LENGTH if self.digest else self.mostly_holes

    @property
    def data(self) -> int:
        """Bytes of it that are not in holes, as far as known."""
        return min(self.size, self.blocks * 512)

    @property
    def nlink(self) -> int:
        return 2 + self.subdirs if self.is_dir and self.links else len(self.links)

    @property
    def attributes(self) -> str:
        """Its mode, owner, group and time, which the bucket stores beside its bytes."""
        return f"{stat.S_IMODE(self.mode):04o} {self.uid} {self.gid} {self.mtime_ns}"

    @property
    def placed(self) -> bool:
        """Whether its record has `_PLACE`, which format 1 did not have."""
        return self.key != 0 or self.namespace != ROOT_INO

    def copy(self) -> "Inode":
        """A copy of the record as it is now. Later changes of this one do not affect it."""
        return Inode(*_ALL(self))  # 1.3 us; dataclasses.replace takes 9

    def copy_from(self, other: "Inode") -> None:
        """Take all values of another record of the same inode."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def pack(self) -> bytes:
        placed = self.placed
        fixed = _FIXED.pack(
            *_NUMBERS(self),
            (_SEALED if self.sealed else 0)
            | (_ON_NVME if self.on_nvme else 0)
            | (_PLACED if placed else 0)
            | (_KEPT if self.unevictable else 0)
            | (_IN_BUCKET if self.in_bucket else 0)
            | (_IS_PACKED if self.packed is not None else 0)
            | (_IN_POOL if self.in_pool else 0),
            len(self.digest),
            self.digest[-16:],
            len(self.links),
        )
        if placed:
            fixed += _PLACE.pack(self.namespace, self.key, self.parent_key, self.model)
        if self.packed is not None:
            codec = self.packed.codec.encode("latin-1")
            fixed += _PACKED.pack(*self.packed[1:], len(codec)) + codec
        if len(self.links) == 1:  # as most have: 1 us less than a generator takes
            return fixed + _PAIR.pack(*self.links[0]) + self.target
        return b"".join((fixed, *(_PAIR.pack(*link) for link in self.links), self.target))

    @classmethod
    def unpack(cls, ino: int, record: bytes) -> "Inode":
        *fields, flags, digest_length, digest, links = _FIXED.unpack_from(record)
        start = _FIXED.size
        place: tuple[int, ...] = ()
        if flags & _PLACED:
            place = _PLACE.unpack_from(record, start)
            start += _PLACE.size
        packed = None
        if flags & _IS_PACKED:
            size, blocks, its_digest, length = _PACKED.unpack_from(record, start)
            start += _PACKED.size + length
            codec = record[start - length : start].decode("latin-1")
            packed = PackedCopy(codec, size, blocks, its_digest)
        end = start + links * _PAIR.size
        found = cls(
            ino,
            *fields,  # type: ignore[call-arg]  # as many as the format says
            bool(flags & _SEALED),
            bool(flags & _ON_NVME),
            _digest(digest_length, digest),
            tuple(_PAIR.iter_unpack(record[start:end])),
            record[end:],
            *place,
        )
        found.unevictable = bool(flags & _KEPT)
        found.in_bucket = bool(flags & _IN_BUCKET)
        found.in_pool = bool(flags & _IN_POOL)
        found.packed = packed
        return found


_ALL = attrgetter(*Inode.__slots__)
_NUMBERS = attrgetter(*Inode.__slots__[1 : 1 + Inode.__slots__.index("ram_epoch")])


def _digest(length: int, digest: bytes) -> bytes:
    if length == SPARSE_LENGTH:
        return SPARSE + digest
    return digest if length else b""
