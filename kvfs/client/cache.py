"""A cache of prefixes in a directory: what engines and connectors call.

Contract: whatever is loaded is a contiguous prefix of what was asked for, whole, of this spec. What
is gone, or can not be read or written, is a miss, counted in `stats` and logged, never raised;
arguments that are wrong are. Not for namespaces (`kvfs.client.namespace`), files
(`kvfs.client.files`) or engines (`kvfs.engines`).
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Literal, NamedTuple

import torch

from kvfs import prefix
from kvfs.client import files
from kvfs.client.arguments import Blocks, blocks_of, count_of, keys_of, shard_of, targets_of
from kvfs.client.load import map_chain, read_chain
from kvfs.client.match import Found, Question, TierBytes, by_stat
from kvfs.client.namespace import open_namespace
from kvfs.client.save import save_chain
from kvfs.client.spec import Spec
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads

Mode = Literal["copy", "mmap"]


class Match(NamedTuple):
    """The longest cached prefix. keys: of all whole blocks of the prompt, cached or not.

    bytes: of what is cached, by tier, where the mount says so.
    """

    blocks: int
    tokens: int
    keys: list[bytes]
    bytes: TierBytes | None


class Loaded(NamedTuple):
    """Blocks that were loaded, and where. What `tensors` has beyond `blocks` is of no account."""

    blocks: int
    tensors: Blocks


class PrefixCache:
    """Blocks of one spec below one directory.

    path: a kvfs namespace with `prefix` on, or any directory. create: make it if it is not there.
    shard: which of the spec's shards is loaded and saved, "0" or 0 and so on; without it, where
    there are several, `match` only. threads: blocks that are read or written at once.

    All methods may be called by any number of threads at once, not after a fork: open it there.
    Raises OSError if the directory can not be had, SpecMismatchError if it is another spec's.
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
        self.path = os.path.abspath(os.fspath(path))
        self.spec = spec
        self.shard = shard_of(shard, spec)
        self.stats = Stats()
        self._closed_prefixes = open_namespace(self.path, spec, create=create)
        self._question = Question(self.path)
        self._threads = Threads(threads)
        self._process: int | None = os.getpid()

    def __enter__(self) -> "PrefixCache":  # noqa: PYI034 (typing has Self since 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what was begun. Mapped tensors stay good."""
        if self._process is not None:
            self._process = None
            self._threads.close()
            self._question.close()

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the longest prefix of which all shards are cached. tokens: see `Spec.keys`."""
        keys = self.spec.keys(tokens)
        found = self._match(self.spec.root, keys, self.spec.shard_names)
        return Match(found.blocks, found.blocks * self.spec.block_tokens, keys, found.bytes)

    def match_keys(self, parent: bytes, keys: Sequence[bytes]) -> Match:
        """The same for blocks that follow the block, or the root, `parent`."""
        chain = keys_of(parent, keys)
        found = self._match(parent, chain, self.spec.shard_names)
        return Match(found.blocks, found.blocks * self.spec.block_tokens, chain, found.bytes)

    def load(
        self,
        tokens: Sequence[int],
        out: Blocks | None = None,
        mode: Mode = "copy",
        blocks: int | None = None,
    ) -> Loaded:
        """Return the longest cached prefix as tensors of `spec.shape`.

        mode "copy": into `out`, `[n, *spec.shape]` or a list of tensors, at most n blocks; without
        it into new memory. "mmap": tensors over the files, read when they are touched; writing
        into one changes this process's copy only. blocks: not more than so many, as `match` says.
        """
        return self.load_keys(self.spec.root, self.spec.keys(tokens), out, mode, blocks)

    def load_keys(
        self,
        parent: bytes,
        keys: Sequence[bytes],
        out: Blocks | None = None,
        mode: Mode = "copy",
        blocks: int | None = None,
    ) -> Loaded:
        """The same for blocks that follow the block, or the root, `parent`."""
        shard = self._own_shard()
        chain = keys_of(parent, keys)
        chain = chain[: count_of(blocks, "blocks", len(chain))]
        if mode == "mmap":
            if out is not None:
                raise ValueError("out: expected None with mode='mmap', which copies nothing")
            mapped = map_chain(self._paths(parent, chain, shard), self.spec, stats=self.stats)
            return Loaded(len(mapped), mapped)
        if mode != "copy":
            raise ValueError(f"mode={mode!r}: expected 'copy' or 'mmap'")
        if out is None:
            if blocks is None:
                chain = chain[: self._match(parent, chain, (shard,)).blocks]
            targets = list(torch.empty((len(chain), *self.spec.shape), dtype=self.spec.torch_dtype))
        else:
            targets = targets_of(out, self.spec)
        count = self._read(self._paths(parent, chain, shard), targets)
        return Loaded(count, targets[:count] if out is None else out)

    def save(self, tokens: Sequence[int], blocks: Blocks, start: int = 0) -> int:
        """Save blocks from block `start` of the prompt on; those that are cached are not touched.

        blocks: `[n, *spec.shape]` or a list of tensors. Returns how many blocks of the prompt's
        beginning are cached now: less than `start` if those before are not.
        """
        keys = self.spec.keys(tokens)
        given = blocks_of(blocks, self.spec, "blocks")
        start = count_of(start, "start", len(keys))
        if start + len(given) > len(keys):
            raise ValueError(
                f"blocks: expected at most {len(keys) - start}, what the prompt has from block "
                f"{start}, got {len(given)}"
            )
        return self._save(self.spec.root, keys[: start + len(given)], given)

    def save_keys(self, parent: bytes, keys: Sequence[bytes], tensors: Blocks) -> int:
        """Save blocks that follow the block, or the root, `parent`; return how many are cached."""
        chain = keys_of(parent, keys)
        given = blocks_of(tensors, self.spec, "tensors")
        if len(given) != len(chain):
            raise ValueError(f"tensors: expected {len(chain)}, one for each key, got {len(given)}")
        return self._save(parent, chain, given)

    def _save(self, parent: bytes, keys: list[bytes], given: list[torch.Tensor]) -> int:
        """Those of the last keys."""
        shard = self._own_shard()
        start = len(keys) - len(given)
        cached = self._match(parent, keys, (shard,)).blocks
        self.stats.add(blocks_present=max(0, cached - start))
        if cached < start:
            self.stats.add(blocks_unsaved=len(given))
            return cached
        if cached == len(keys):
            return cached

        @contextlib.contextmanager
        def content(at: int) -> Iterator[memoryview]:
            block = given[cached - start + at].contiguous()
            yield files.memory(block)

        return cached + save_chain(
            self.path,
            keys[cached - 1] if cached else parent,
            keys[cached:],
            shard,
            content,
            parent_cached=cached > 0 or parent == self.spec.root,
            closed=self._closed_prefixes,
            threads=self._threads,
            stats=self.stats,
        )

    def _read(self, paths: list[str], targets: list[torch.Tensor]) -> int:
        def read(at: int, fd: int, path: str) -> None:
            files.read_into(fd, files.memory(targets[at]), path)

        paths = paths[: len(targets)]
        return read_chain(
            paths, read, self.spec.stored_bytes, threads=self._threads, stats=self.stats
        )

    def _match(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> Found:
        self._check_open()
        size = self.spec.stored_bytes
        found = self._question.ask(parent, keys, shards, size)
        return found or by_stat(self.path, parent, keys, shards, size)

    def _paths(self, parent: bytes, keys: Sequence[bytes], shard: str) -> list[str]:
        parents = (parent, *keys)
        return [
            f"{self.path}/{prefix.path(above, key, shard)}"
            for above, key in zip(parents, keys, strict=False)
        ]

    def _own_shard(self) -> str:
        self._check_open()
        if self.shard is None:
            raise ValueError(f"shard=None: expected 0 to {self.spec.shards - 1} to load and save")
        return self.shard

    def _check_open(self) -> None:
        if self._process is None:
            raise ValueError(f"the cache of {self.path} is closed")
        if self._process != os.getpid():
            raise RuntimeError(f"the cache of {self.path} was opened before a fork: open it here")
