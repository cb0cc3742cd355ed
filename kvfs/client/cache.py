"""A cache of prefixes in a directory: engines and connectors call it.

Contract: a load returns a contiguous prefix of the requested blocks, whole, of this spec. A block
that is gone, or cannot be read or written, is a miss: it is counted in `stats` and logged, never
raised. Wrong arguments are raised. Not for namespaces (`kvfs.client.namespace`), for the movement
of blocks (`leased`, `save`, `transfer`) or for engines (`kvfs.connectors`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch

from kvfs.client import arguments, files, memory
from kvfs.client.arguments import BlockTensors
from kvfs.client.leased import LeasedReader, LeasedWriter
from kvfs.client.leases import LeaseClient
from kvfs.client.match import Bisection, MatchResult, Question, TierBytes
from kvfs.client.namespace import names_at_once, open_namespace
from kvfs.client.save import paths_of, save_chain
from kvfs.client.spec import Spec
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads, awaited
from kvfs.client.transfer import Cuda, Done, Host, Transfer

Mode = Literal["copy", "mmap"]
DeviceLike = torch.device | str | None
_PIN = "user.kvfs.pin"  # of a file: SEMANTICS.md


class Match(NamedTuple):
    """The longest cached prefix. keys: of all whole blocks of the prompt, cached or not.

    bytes: of the cached blocks, by tier, where the mount says so.
    """

    blocks: int
    tokens: int
    keys: list[bytes]
    bytes: TierBytes | None


class Loaded(NamedTuple):
    """The loaded blocks and their tensors. The rest of `tensors` beyond `blocks` is undefined."""

    blocks: int
    tensors: BlockTensors


class PrefixCache:
    """Blocks of one spec below one directory.

    - path: a kvfs namespace with `prefix` on, or any directory.
    - create: make the directory if it does not exist.
    - shard: the shard of the spec to load and save, "0" or 0 and so on. Without it, a cache with
      several shards can only `match`.
    - threads: the number of blocks to read or write at a time.

    Any number of threads may call all methods at a time. A process must not use them after a fork:
    it opens the cache there. Raises OSError if the directory cannot be had, SpecMismatchError if it
    is another spec's. A use after `close` raises ValueError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spec: Spec,
        *,
        shard: str | int | None = None,
        threads: int = 4,
        create: bool = False,
    ) -> None:
        if not isinstance(spec, Spec):
            raise TypeError(f"spec={spec!r}: expected a kvfs.client.Spec")
        if type(threads) is not int or threads < 1:
            raise ValueError(f"threads={threads!r}: expected an int of at least 1")
        self.path = os.path.abspath(arguments.directory_of(path))
        self.spec = spec
        self.shard = arguments.shard_of(shard, spec)
        self.stats = Stats()
        self._closed_prefixes = open_namespace(self.path, spec, create=create)
        self._question = Question(self.path)
        self._bisection = Bisection(self.path, spec.stored_bytes)
        self._leases = LeaseClient(self.path)
        self._threads = Threads(threads)
        self._transfers: dict[torch.device, Transfer] = {}
        self._process: int | None = os.getpid()

    def __enter__(self) -> "PrefixCache":  # noqa: PYI034 (typing has Self since 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running calls. Mapped tensors stay valid. Does nothing in a forked child."""
        process, self._process = self._process, None
        if process == os.getpid():
            self._threads.close()
            self._question.close()
            self._leases.close()

    # Matching

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the longest prefix of which all shards are cached. tokens: see `Spec.keys`."""
        return self._matching(self.spec.root, self.spec.keys(tokens))

    def match_keys(self, parent: bytes, keys: Sequence[bytes]) -> Match:
        """Return the longest cached prefix of blocks that follow the block, or root, `parent`."""
        return self._matching(parent, arguments.keys_of(parent, keys))

    async def amatch(self, tokens: Sequence[int]) -> Match:
        """Run `match` beside asyncio's or trio's loop. So do all methods with an "a" before."""
        keys = self.spec.keys(tokens)
        self._check_open()
        return await awaited(self._threads.submit(self._matching, self.spec.root, keys))

    # Loading

    def load(
        self,
        tokens: Sequence[int],
        out: BlockTensors | None = None,
        mode: Mode = "copy",
        device: DeviceLike = None,
        blocks: int | None = None,
    ) -> Loaded:
        """Return the longest cached prefix as tensors of `spec.shape`.

        - mode "copy": copies into `out`, `[n, *spec.shape]` or a list of n tensors, at most n
          blocks. Without `out` it copies into new memory of `device`, by default the CPU.
        - mode "mmap": returns tensors over the files, which are read when the caller touches them.
          Writing into one changes this process's copy only.
        - blocks: the most blocks to load, as `match` has found.

        Raises TypeError and ValueError for arguments, and nothing for blocks.
        """
        load = self._load(self.spec.root, self.spec.keys(tokens), out, mode, device, blocks)
        return self._threads.call(load)

    def load_keys(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        out: BlockTensors | None = None,
        mode: Mode = "copy",
        device: DeviceLike = None,
        blocks: int | None = None,
    ) -> Loaded:
        """Load blocks that follow the block, or root, `parent`, as `load` does."""
        load = self._load(parent, arguments.keys_of(parent, keys), out, mode, device, blocks)
        return self._threads.call(load)

    def submit_load(
        self,
        tokens: Sequence[int],
        out: BlockTensors | None = None,
        mode: Mode = "copy",
        device: DeviceLike = None,
        blocks: int | None = None,
    ) -> Future[Loaded]:
        """Run `load` on a thread of the cache, which uses `out` until it ends.

        Wrong arguments are raised here.
        """
        load = self._load(self.spec.root, self.spec.keys(tokens), out, mode, device, blocks)
        return self._threads.submit(load)

    async def aload(
        self,
        tokens: Sequence[int],
        out: BlockTensors | None = None,
        mode: Mode = "copy",
        device: DeviceLike = None,
        blocks: int | None = None,
    ) -> Loaded:
        """Run `load` beside the loop; a cancelled task waits until the load leaves `out` alone."""
        return await awaited(self.submit_load(tokens, out, mode, device, blocks))

    # Saving

    def save(self, tokens: Sequence[int], blocks: BlockTensors, start: int = 0) -> int:
        """Save blocks from block `start` of the prompt on; cached blocks are not touched.

        blocks: `[n, *spec.shape]` or a list of n tensors, on the CPU or a CUDA device. Returns the
        number of blocks from the prompt's beginning that are cached now. If it is less than
        `start`, the blocks before are missing, and nothing was saved.

        Raises TypeError and ValueError for arguments, and nothing for blocks.
        """
        return self._threads.call(self._save(*self._tail(tokens, blocks, start)))

    def save_keys(self, parent: bytes, keys: Sequence[bytes], tensors: BlockTensors) -> int:
        """Save blocks that follow the block, or root, `parent`.

        Returns the number of them, from the first, that are cached now: none if the parent is not.
        """
        chain = arguments.keys_of(parent, keys)
        given = arguments.blocks_of(tensors, self.spec, "tensors")
        if len(given) != len(chain):
            raise ValueError(f"tensors: expected {len(chain)}, one for each key, got {len(given)}")
        return self._threads.call(self._save(parent, chain, given))

    def submit_save(
        self, tokens: Sequence[int], blocks: BlockTensors, start: int = 0
    ) -> Future[int]:
        """Run `save` on a thread of the cache. Raises for wrong arguments; `blocks` must stay."""
        return self._threads.submit(self._save(*self._tail(tokens, blocks, start)))

    async def asave(self, tokens: Sequence[int], blocks: BlockTensors, start: int = 0) -> int:
        """Run `save` beside the loop; a cancelled task waits until it leaves `blocks` alone."""
        return await awaited(self.submit_save(tokens, blocks, start))

    # Prefetch and pins

    def prefetch(self, tokens: Sequence[int]) -> Future[int]:
        """Open the longest cached prefix in the background; the result is its number of blocks.

        An open downloads a block that only the bucket has. It counts towards the opens after which
        a mount promotes a block from NVMe to RAM.
        """
        shard = self._own_shard()
        keys = self.spec.keys(tokens)

        def check(_at: int, fd: int) -> None:
            files.check_size(fd, self.spec.stored_bytes)

        def run() -> int:
            found = self._match(self.spec.root, keys, (shard,)).blocks
            chain = self._chain(self.spec.root, keys[:found], shard)
            counted = "blocks_prefetched"
            return chain.read(check, threads=self._threads, stats=self.stats, counted=counted)

        return self._threads.submit(run)

    async def aprefetch(self, tokens: Sequence[int]) -> int:
        """Run `prefetch` and wait for its end."""
        return await awaited(self.prefetch(tokens))

    def pin(self, tokens: Sequence[int], *, on: bool = True) -> int:
        """Pin the longest cached prefix against drops, or unpin it; return its number of blocks.

        It pins all shards. Only root and the user of the mount may pin: others get PermissionError.
        Raises OSError. On other file systems a pin is at most an attribute of the files, without
        effect.
        """
        keys = self.spec.keys(tokens)
        found = self._match(self.spec.root, keys, self.spec.shard_names).blocks
        chains = [
            paths_of(self.path, self.spec.root, keys[:found], shard)
            for shard in self.spec.shard_names
        ]
        for count, paths in enumerate(zip(*chains, strict=True)):
            try:
                for path in paths:
                    os.setxattr(path, _PIN, b"on" if on else b"off")
            except FileNotFoundError:  # dropped meanwhile
                return count
        return found

    # Internals

    def _matching(self, parent: bytes, keys: list[bytes]) -> Match:
        found = self._match(parent, keys, self.spec.shard_names)
        return Match(found.blocks, found.blocks * self.spec.block_tokens, keys, found.bytes)

    def _match(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> MatchResult:
        self._check_open()
        size = self.spec.stored_bytes
        found = self._question.ask(parent, keys, shards, size)
        if found is None or found.bytes is None:
            return self._bisection.ask(parent, keys, shards)
        known = self._bisection.before_hole(parent, keys[: found.blocks], shards)
        if known < found.blocks:
            self._question.renew()
            sure = self._question.ask(parent, keys[:known], shards, size)
            return sure or self._bisection.ask(parent, keys[:known], shards)
        if known == len(keys):
            return found
        # Other nodes may have put more into the bucket; if not, this costs one stat.
        last = keys[known - 1] if known else parent
        more = self._bisection.ask(last, keys[known:], shards).blocks
        theirs = TierBytes(0, 0, more * size * len(shards))
        return MatchResult(known + more, found.bytes.plus(theirs))

    def _load(
        self,
        parent: bytes,
        keys: list[bytes],
        out: BlockTensors | None,
        mode: str,
        device: DeviceLike,
        blocks: int | None,
    ) -> Callable[[], Loaded]:
        """Check all arguments and return the function that loads."""
        shard = self._own_shard()
        most = keys[: arguments.count_of(blocks, "blocks", len(keys))]
        where = arguments.device_of(device)
        if mode == "mmap":
            if not self.spec.stored.raw:
                raise ValueError(f"mode='mmap': expected storage='raw', got {self.spec.storage!r}")
            if out is not None or where.type != "cpu":
                raise ValueError(
                    f"mode='mmap': expected out=None and the CPU, got device={device!r}, "
                    f"out={type(out).__name__}: mmap copies nothing"
                )
            return lambda: self._mapped(parent, most, shard)
        if mode != "copy":
            raise ValueError(f"mode={mode!r}: expected 'copy' or 'mmap'")
        if out is not None:
            targets = arguments.targets_of(out, self.spec, None if device is None else where)
            place = targets[0].device if len(targets) else where
            transfer, after = self._transfer(place)
            return lambda: Loaded(
                self._copied(parent, most[: len(targets)], shard, targets, transfer, after), out
            )
        transfer, after = self._transfer(where)

        def run() -> Loaded:
            chain = most
            if blocks is None:
                chain = most[: self._match(parent, most, (shard,)).blocks]
            shape = (len(chain), *self.spec.shape)
            if where.type == "cpu":
                new = memory.new(shape, self.spec.torch_dtype)
            else:
                new = torch.empty(shape, dtype=self.spec.torch_dtype, device=where)
            count = self._copied(parent, chain, shard, new, transfer, after)
            return Loaded(count, list(new[:count]))

        return run

    def _mapped(self, parent: bytes, keys: list[bytes], shard: str) -> Loaded:
        chain = self._chain(parent, keys, shard)
        found: dict[int, torch.Tensor] = {}

        def map_one(at: int, fd: int) -> None:
            found[at] = chain.map(at, fd).view(self.spec.torch_dtype).view(self.spec.shape)

        count = chain.read(map_one, threads=self._threads, stats=self.stats, mapped=True)
        self._ended(keys, count)
        return Loaded(count, [found[at] for at in range(count)])

    def _copied(
        self,
        parent: bytes,
        keys: list[bytes],
        shard: str,
        targets: BlockTensors,
        transfer: Transfer | None,
        after: Done,
    ) -> int:
        chain = self._chain(parent, keys, shard)
        if transfer is None:
            views = memory.views(targets, len(keys))

            def read(at: int, fd: int) -> None:
                files.read_into(fd, views[at])

            count = chain.read(read, threads=self._threads, stats=self.stats)
        else:
            count = transfer.load(chain, targets, after)
        self._ended(keys, count)
        return count

    def _ended(self, keys: list[bytes], count: int) -> None:
        if count < len(keys):
            self._bisection.missed(keys[count])

    def _tail(
        self, tokens: Sequence[int], blocks: BlockTensors, start: int
    ) -> tuple[bytes, list[bytes], list[torch.Tensor]]:
        """Return the root, the keys up to the last given block, and these blocks."""
        keys = self.spec.keys(tokens)
        given = arguments.blocks_of(blocks, self.spec, "blocks")
        begin = arguments.count_of(start, "start", len(keys))
        if begin + len(given) > len(keys):
            raise ValueError(
                f"blocks: expected at most {len(keys) - begin}, as the prompt has from block "
                f"{begin} on, got {len(given)}"
            )
        return self.spec.root, keys[: begin + len(given)], given

    def _save(
        self, parent: bytes, keys: list[bytes], given: list[torch.Tensor]
    ) -> Callable[[], int]:
        """Return a function that saves the blocks of the last keys.

        It returns the number of all keys that are cached.
        """
        shard = self._own_shard()
        start = len(keys) - len(given)
        transfer, after = self._transfer(given[0].device if given else arguments.device_of(None))

        def run() -> int:
            cached = self._match(parent, keys, (shard,)).blocks
            self.stats.add(blocks_present=max(0, cached - start))
            if cached < start:
                self.stats.add(blocks_unsaved=len(given))
                return cached
            if cached == len(keys):
                return cached

            def content(at: int) -> AbstractContextManager[memory.Runs]:
                block = given[cached - start + at]
                if transfer is not None:
                    return transfer.content(block, after)
                return memory.content(block)

            above = keys[cached - 1] if cached else parent
            chain = (self.path, above, keys[cached:], shard)
            made = None
            # A mount on this machine, where files may grow to blocks.
            if self._closed_prefixes and self._question.offered and names_at_once(self.path):
                made = LeasedWriter(*chain, self.spec.stored_bytes, self._leases)
            return cached + save_chain(
                *chain,
                content,
                parent_cached=cached > 0 or parent == self.spec.root,
                closed=self._closed_prefixes,
                made=made,
                threads=self._threads,
                stats=self.stats,
            )

        return run

    def _transfer(self, where: torch.device) -> tuple[Transfer | None, Done]:
        """Return the way to a device, after the present work of the caller's stream.

        None if it needs no way: the block's memory is the file's content.
        """
        if where.type == "cpu" and self.spec.stored.raw:
            return None, lambda: None
        transfer = self._transfers.get(where)
        if transfer is None:
            device = Host() if where.type == "cpu" else Cuda(where)
            made = Transfer(device, self.spec, self._threads, self.stats)
            transfer = self._transfers.setdefault(where, made)
        return transfer, transfer.begin()

    def _chain(self, parent: bytes, keys: list[bytes], shard: str) -> LeasedReader:
        return LeasedReader(self.path, parent, keys, shard, self.spec.stored_bytes, self._leases)

    def _own_shard(self) -> str:
        self._check_open()
        if self.shard is None:
            raise ValueError(f"shard=None: expected 0 to {self.spec.shards - 1} to load and save")
        return self.shard

    def _check_open(self) -> None:
        if self._process is None:
            raise ValueError(f"the cache of {self.path} is closed")
        if self._process != os.getpid():
            raise RuntimeError(
                f"the cache of {self.path} was opened before a fork: open it again here"
            )
