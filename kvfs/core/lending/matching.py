"""Matching: how many leading blocks of a prompt are cached without a gap, and in which tiers.

Contract: `answer` looks at each block of the request, in slices of some 1 ms with a turn of the
loop between them. The first block that is not there counts as a miss. A file that `Blocks` has is
there. `Blocks` lacks a file that is being closed, or that the census has not reached: `answer` asks
the catalog for it by name, some 20 us each. So an answer may be too short, but it is never too long
for its moment. A file that is being written does not count. Raises StaleError for a directory that
is no namespace of blocks.

Blocks that follow, and that other nodes of a pool have, count as those in the bucket: an open
fetches them. Not for the format of requests and answers (`kvfs.matching`). Not for blocks that
other nodes have put into the bucket: lookups of names find these.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import reduce
from operator import and_
from struct import iter_unpack

import trio

from kvfs import matching
from kvfs.core.lending.read_leases import of_blocks
from kvfs.core.names.tree import Tree
from kvfs.core.namespaces.blocks import ONE_FILE, Blocks, Sums, sums, tiers, value
from kvfs.core.namespaces.namespace import Namespace
from kvfs.layouts.prefix import NUMBER_MAX, file_number, number
from kvfs.matching import MatchAnswer, MatchRequest
from kvfs.prefix import KEY_BYTES
from kvfs.s3.keys import Keys, ObjectName

SLICE = 4096  # files, in some 0.6 ms
NAMED_AT_ONCE = 32  # lookups of files by name in the catalog, in a step of the loop


# The sizes of files, as long as live nodes of the pool have them: the directory above them, their
# paths below it, and the key of each.
Elsewhere = Callable[[int, Sequence[bytes], Sequence[str]], Awaitable[Sequence[int]]]


class Matching:
    """Answers for the namespaces of a tree whose paths are prefixes."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.ledger = tree.ledger
        self.catalog = tree.catalog
        self.namespaces = tree.namespaces
        self.elsewhere: Elsewhere | None = None

    def is_asked(self, ino: int) -> bool:
        """Whether programs can ask this directory for blocks: it is a namespace of blocks."""
        space = self.namespaces.own(ino)
        return space is not None and space.blocks is not None

    async def answer(self, ino: int, request: MatchRequest) -> MatchAnswer:
        """The cached part of the requested prefix, in the namespace of this directory."""
        space, blocks = of_blocks(self.namespaces, ino)
        return await _MatchQuestion(self, space, blocks, request).answer()


class _MatchQuestion:
    def __init__(
        self, matching_: Matching, space: Namespace, blocks: Blocks, request: MatchRequest
    ) -> None:
        self.elsewhere = matching_.elsewhere
        self.tree = matching_.tree
        self.ledger = matching_.ledger
        self.space = space
        self.blocks = blocks
        self.request = request
        self.shards = [shard.encode() for shard in request.shards]
        self.named = 0  # files that were looked for by name

    async def answer(self) -> MatchAnswer:
        request = self.request
        found = await self._answer(request)
        asks = found.blocks < request.blocks and self.space.settings.pool
        if asks and self.elsewhere is not None:
            found = await self._with_pool(found, self.elsewhere)
        if found.blocks < request.blocks:  # the first block that is not there is a miss
            key = request.keys[KEY_BYTES * found.blocks : KEY_BYTES * (found.blocks + 1)]
            self.ledger.misses.counted(self.space, number(key))
        return found

    async def _answer(self, request: MatchRequest) -> MatchAnswer:
        # The later keys need no such check: each key is made of the one before it.
        if not request.blocks or self._by_name(0, self.shards[0]) is None:
            return MatchAnswer(0, 0, 0, 0)
        step = max(1, SLICE // len(self.shards))
        found = Sums(0, 0, 0)
        where, sizes = bytearray(), list[int]()
        matched, details = 0, bool(request.flags & matching.DETAILS)
        for start in range(0, request.blocks, step):
            if start:
                await trio.lowlevel.checkpoint()
            values = await self._values(start, min(request.blocks, start + step))
            count = min(map(len, values))
            for of_shard in values:
                found = found.with_more(sums(of_shard[:count]))
            if details:
                where += _tiers(values, count)
                sizes += _sizes(values, count)
            matched += count
            if start + count < min(request.blocks, start + step):
                break
        return MatchAnswer(matched, found.ram, found.nvme, found.s3, bytes(where), tuple(sizes))

    async def _with_pool(self, found: MatchAnswer, elsewhere: Elsewhere) -> MatchAnswer:
        """The answer with the blocks that follow it on other nodes."""
        name = self.tree.catalog.first_name(self.tree.directory(self.space.ino))
        if name is None:
            return found
        keys = Keys("")
        paths = [
            path for at in range(found.blocks, self.request.blocks) for path in self._paths(at)
        ]
        version = self.space.settings.version
        wanted = [keys.of(ObjectName(name[1].name, version, path)) for path in paths]
        files = await elsewhere(self.space.ino, paths, wanted)
        shards = len(self.shards)
        more = len(files) // shards
        if not more:
            return found
        sizes = [sum(files[at : at + shards]) for at in range(0, more * shards, shards)]
        found = found._replace(blocks=found.blocks + more, bucket=found.bucket + sum(sizes))
        if self.request.flags & matching.DETAILS:
            where = found.tiers + bytes([matching.BUCKET]) * more
            found = found._replace(tiers=where, sizes=(*found.sizes, *sizes))
        return found

    def _paths(self, at: int) -> Iterable[bytes]:
        """The paths of the files of a block, below the namespace."""
        for shard in self.shards:
            yield self._key(at - 1) + b"/" + self._key(at) + (b"." + shard if shard else b"")

    async def _values(self, start: int, end: int) -> list[list[int]]:
        """The values of the files of each shard, up to the first file that is not there."""
        get, keys = self.blocks.value, self.request.keys
        some = keys[KEY_BYTES * start : KEY_BYTES * end]
        numbers = [key & NUMBER_MAX for (key,) in iter_unpack(">Q8x", some)]
        found = []
        for shard in self.shards:
            files = [file_number(key, shard) for key in numbers] if shard else numbers
            values = [get(key, 0) for key in files]
            if values and min(values) < ONE_FILE:
                values = await self._without_gap(values, start, shard)
            found.append(values)
            end = start + len(values)
            numbers = numbers[: len(values)]
        return found

    async def _without_gap(self, values: list[int], start: int, shard: bytes) -> list[int]:
        """The values up to the first file that neither `Blocks` nor the catalog has."""
        for at, known in enumerate(values):
            if known >= ONE_FILE:
                continue
            self.named += 1
            if not self.named % NAMED_AT_ONCE:
                await trio.lowlevel.checkpoint()
            named = self._by_name(start + at, shard)
            if named is None:
                return values[:at]
            values[at] = named
        return values

    def _key(self, at: int) -> bytes:
        """The key of a block as a name. The block before the first has the number -1."""
        key = self.request.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] if at >= 0 else None
        return (key or self.request.parent).hex().encode()

    def _by_name(self, at: int, shard: bytes) -> int | None:
        """The value of a complete file; None if there is none here or in the bucket."""
        above = self.tree.catalog.lookup(self.space.ino, self._key(at - 1))
        if above is None:
            return None
        name = self._key(at) + (b"." + shard if shard else b"")
        entry = self.tree.entry(above.ino, name)
        if entry is None or not entry[1].is_file or not entry[1].sealed:
            return None
        inode = entry[1]
        if inode.in_pool:  # the index knows whether a live node has it
            return None
        holders = [tier.name for tier in self.ledger.tiers.holders(inode)]
        return value(inode, [*holders, "s3"] if inode.in_bucket else holders)


def _tiers(values: Sequence[Sequence[int]], count: int) -> bytes:
    """For each block, the tiers that have all of it."""
    every = [_each(tiers, of_shard[:count]) for of_shard in values]
    if len(every) == 1:
        return bytes(every[0])
    return bytes(reduce(and_, column) for column in zip(*every, strict=True))


def _sizes(values: Sequence[Sequence[int]], count: int) -> Iterable[int]:
    every = [_each(_size, of_shard[:count]) for of_shard in values]
    return every[0] if len(every) == 1 else map(sum, zip(*every, strict=True))


def _size(value: int) -> int:
    return sum(sums((value,)))


def _each(say: Callable[[int], int], values: Sequence[int]) -> Iterable[int]:
    """The result of `say` for each value. `say` is called once for equal values: few differ."""
    return map({value: say(value) for value in set(values)}.__getitem__, values)
