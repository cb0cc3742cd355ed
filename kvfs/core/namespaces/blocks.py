"""What is cached of each block of a prefix namespace, in memory: where, how much, what follows.

Contract: synchronous, no I/O. It is told of sealed files as the accounts are (`Namespaces.count`),
so that it is whole when the census has counted all; what is being written is not in it. A file is
known by a number of 63 bits, made of its block's key and its shard: two of 10**7 have the same with
a probability of 5e-6, which costs a miss. About 100 bytes a file (scripts/bench/match.py), since
one integer says all of a file, and equal ones are shared.
Not for names: who must be sure looks in the catalog (`Matching`).
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.layouts.prefix import file_number

SIZE, COUNT, CHILDREN = 64, 16, 48  # bits of a sum of sizes, of files, of what comes next
TIERS = ("ram", "nvme", "s3")  # the fastest first: its bytes are counted there
_ONE = {tier: 1 << (len(TIERS) * SIZE + at * COUNT) for at, tier in enumerate(TIERS)}
_CHILD = 1 << (len(TIERS) * (SIZE + COUNT))
ONE_FILE = _CHILD << CHILDREN  # a value that is not less says that there is a file
_SIZES = (1 << SIZE) - 1
_SHARED_MAX = 4096


class Sums(NamedTuple):
    """Bytes, each where it is fastest to be had."""

    ram: int
    nvme: int
    s3: int

    def with_more(self, other: "Sums") -> "Sums":
        return Sums(self.ram + other.ram, self.nvme + other.nvme, self.s3 + other.s3)


class Blocks:
    """`leaf(number)` is told of each block when nothing follows it any more."""

    def __init__(self, leaf: Callable[[int], None]) -> None:
        self._leaf = leaf
        self._of: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self.value = self._of.get  # (number, default): for sums

    def __len__(self) -> int:
        return len(self._of)

    def count(self, inode: Inode, holders: Collection[str], sign: int) -> None:
        """A sealed file comes (1) or goes (-1), or is to be had elsewhere."""
        if not inode.model:  # no name of a block
            return
        self._add(file_number(inode.key, inode.target), sign * value(inode, holders))
        if inode.parent_key:
            self._add(inode.parent_key, sign * _CHILD)
            if sign < 0 and not self.children(inode.parent_key):
                self._leaf(inode.parent_key)

    def _add(self, number: int, more: int) -> None:
        before = self._of.get(number, 0)
        if more < 0 and before < -more:  # it was here before the namespace was told of prefixes
            return
        after = before + more
        if not after:
            del self._of[number]
            return
        if len(self._shared) > _SHARED_MAX:
            self._shared.clear()
        self._of[number] = self._shared.setdefault(after, after)

    def children(self, number: int) -> int:
        """Files of blocks that come next."""
        return (self._of.get(number, 0) % ONE_FILE) // _CHILD


def value(inode: Inode, holders: Collection[str]) -> int:
    """Return what stands for a file; values are added."""
    found, fastest = ONE_FILE, True
    for at, tier in enumerate(TIERS):
        if tier in holders:
            found += _ONE[tier] + (inode.size << (at * SIZE) if fastest else 0)
            fastest = False
    return found


def sums(values: Iterable[int]) -> Sums:
    """Return the bytes of files by their values."""
    total = sum(values)
    return Sums(*(total >> (at * SIZE) & _SIZES for at in range(len(TIERS))))


def tiers(value: int) -> int:
    """Return where a file is: 1 in RAM, 2 on NVMe, 4 in the bucket, added."""
    return sum(1 << at for at, tier in enumerate(TIERS) if value // _ONE[tier] & ((1 << COUNT) - 1))
