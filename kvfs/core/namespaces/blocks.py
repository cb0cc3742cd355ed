"""The cached blocks of a prefix namespace, in memory: their tiers, bytes and next blocks.

Contract: synchronous, no I/O. Sealed files are counted here as in the accounts
(`Namespaces.count`), so the table is complete after the census. Files that are being written are
not in it. A number of 63 bits, made of the block's key and the shard, stands for a file. Two of
10**7 files have the same number with a probability of 5e-6, which costs a miss. A file takes about
100 bytes (scripts/bench/match.py): one integer has all facts of a file, and equal ones are shared.
Not for names: a caller that must be sure looks in the catalog (`Matching`).
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.layouts.prefix import file_number

SIZE, COUNT, CHILDREN = 64, 16, 48  # bits of a sum of sizes, of files, of next blocks' files
TIERS = ("ram", "nvme", "s3")  # the fastest first: its bytes are counted there
_ONE = {tier: 1 << (len(TIERS) * SIZE + at * COUNT) for at, tier in enumerate(TIERS)}
_CHILD = 1 << (len(TIERS) * (SIZE + COUNT))
ONE_FILE = _CHILD << CHILDREN  # a value of at least this much means that there is a file
_SIZES = (1 << SIZE) - 1
_SHARED_MAX = 4096


class Sums(NamedTuple):
    """Bytes by tier. Each byte counts in the fastest tier that has it."""

    ram: int
    nvme: int
    s3: int

    def with_more(self, other: "Sums") -> "Sums":
        return Sums(self.ram + other.ram, self.nvme + other.nvme, self.s3 + other.s3)


class Blocks:
    """The blocks of one namespace. `leaf(number)` is called when a block becomes a leaf."""

    def __init__(self, leaf: Callable[[int], None]) -> None:
        self._leaf = leaf
        self._of: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self.value = self._of.get  # (number, default): for sums

    def __len__(self) -> int:
        return len(self._of)

    def count(self, inode: Inode, holders: Collection[str], sign: int) -> None:
        """Count a sealed file that comes (1) or goes (-1). A change of its tiers is one of each."""
        if not inode.model:  # no name of a block
            return
        self._add(file_number(inode.key, inode.target), sign * value(inode, holders))
        if inode.parent_key:
            self._add(inode.parent_key, sign * _CHILD)
            if sign < 0 and not self.children(inode.parent_key):
                self._leaf(inode.parent_key)

    def _add(self, number: int, more: int) -> None:
        before = self._of.get(number, 0)
        if more < 0 and before < -more:  # it was here before the namespace got prefix=on
            return
        after = before + more
        if not after:
            del self._of[number]
            return
        if len(self._shared) > _SHARED_MAX:
            self._shared.clear()
        self._of[number] = self._shared.setdefault(after, after)

    def children(self, number: int) -> int:
        """The number of files of the next blocks."""
        return (self._of.get(number, 0) % ONE_FILE) // _CHILD


def value(inode: Inode, holders: Collection[str]) -> int:
    """Return the integer that stands for a file; values can be added."""
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
    """Return the sum of a file's places: 1 for RAM, 2 for NVMe, 4 for the bucket."""
    return sum(1 << at for at, tier in enumerate(TIERS) if value // _ONE[tier] & ((1 << COUNT) - 1))
