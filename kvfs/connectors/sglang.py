"""SGLang's HiCache on a kvfs namespace: a dynamic storage backend, for SGLang 0.5.23.

SGLang loads it by `--hicache-storage-backend dynamic`; `kvfs connect sglang NAMESPACE --native`
prints the rest. Options of the extra config:

- `path`: the namespace's directory.
- `threads` (8): pages in flight.
- `model`, `revision`, `tokenizer` and `adapter`: parts of the fingerprint, where SGLang's name of
  the model does not tell them apart.

A page is a block. Its key is XXH3-128 over the fingerprint's root key and SGLang's own hash. That
hash is a SHA-256 over the tokens and the hash of the page before; it knows no model, dtype or
layout. With `interface_v1` a page's file is in the directory of the page before, as `kvfs.prefix`
has it. SGLang then names the pages before in each call (`hicache_storage_pass_prefix_keys`), and
bytes go between files and its host memory without another copy. Without `interface_v1`, SGLang does
not name them, and all pages are beside each other.

Contract: a failure of the mount is a miss. The connector serves one pool of keys and values, or of
MLA's latents. It refuses models that need more pools (Mamba, sliding windows, an indexer) as they
are registered.
"""

# ruff: noqa: ANN401, ARG002 (SGLang's signatures)

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from xxhash import xxh3_128_digest

from kvfs.client import PrefixCache, Spec

_log = logging.getLogger(__name__)
THREADS = 8
# The axes of a page as a host pool has it, by layout, behind "kv" where there are two of them.
# Layouts by page have an axis of one page before these.
AXES = {
    "layer_first": ("layer", "token", "head", "dim"),
    "page_first": ("token", "layer", "head", "dim"),
    "page_first_direct": ("layer", "token", "head", "dim"),
    "page_head": ("head", "token", "layer", "dim"),
}
_BY_PAGE = ("page_first_direct", "page_head")
_IDENTITY = ("revision", "tokenizer", "adapter")


class KvfsHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there to be checked
    """Pages of one model and one layout in one namespace."""

    def __init__(self, storage_config: Any, _extra: Any = None) -> None:
        """Read the options. `storage_config`: a HiCacheStorageConfig. Raises ValueError."""
        self._config = storage_config
        self._told = dict(storage_config.extra_config or {})
        self._chained = bool(self._told.get("interface_v1"))
        path = self._told.get("path")
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"path={path!r} in SGLang's --hicache-storage-backend-extra-config: expected the "
                "directory of a kvfs namespace"
            )
        self._cache: PrefixCache | None = None

    @property
    def cache(self) -> PrefixCache:
        """Return the cache of the pages, once a host pool is registered."""
        assert self._cache is not None, "register_mem_pool_host comes first"
        return self._cache

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the namespace for pages of this pool.

        Raises ValueError for a pool of another kind, OSError and SpecMismatchError for the
        namespace: then SGLang does not start with this storage.
        """
        super().register_mem_pool_host(mem_pool_host)
        page = self._page(0)
        config = self._config
        ranks = config.pp_size * config.attn_cp_size
        rank = config.pp_rank * config.attn_cp_size + config.attn_cp_rank
        if not config.is_mla_model:  # MLA's latents are the same in all ranks
            ranks, rank = ranks * config.tp_size, rank * config.tp_size + config.tp_rank
        spec = Spec(
            model=self._told.get("model") or config.model_name or "",
            **{name: self._told.get(name, "") for name in _IDENTITY},
            dtype=page.dtype,
            axes=dict(zip(self._axes(page), page.shape, strict=True)),
            shards=ranks,
        )
        threads = self._told.get("threads", THREADS)
        shard = rank if ranks > 1 else None
        self._cache = PrefixCache(self._told["path"], spec, shard=shard, threads=threads)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Refuse all pools but that of keys and values with ValueError."""
        if host_pool_name != PoolName.KV:
            raise ValueError(
                f"host pool {host_pool_name}: expected {PoolName.KV} alone; kvfs.connectors.sglang "
                "cannot store this model, --hicache-storage-backend file can"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return the number of pages, from the first, that all ranks have."""
        chain = self._keys(keys)
        if self._chained:
            return self.cache.match_keys(self._parent(extra_info), chain).blocks
        for at, key in enumerate(chain):
            if not self.cache.match_keys(self.cache.spec.root, [key]).blocks:
                return at
        return len(chain)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the pool; a page whose result is false has undefined bytes there.

        host_indices: of all tokens of the pages, as SGLang has them.
        """
        pages = self._pages(host_indices)
        chain = self._keys(keys)
        count = self.cache.load_keys(self._parent(extra_info), chain, out=pages).blocks
        return [at < count for at in range(len(chain))]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Write pages of the pool; a result is true if the page is cached now."""
        pages = self._pages(host_indices)
        chain = self._keys(keys)
        count = self.cache.save_keys(self._parent(extra_info), chain, pages)
        return [at < count for at in range(len(chain))]

    def exists(self, key: str) -> bool:
        """Return whether a page is cached, without knowledge of the pages before it."""
        return self.cache.match_keys(self.cache.spec.root, self._keys([key])).blocks == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read such a page into a flat tensor, and return it; None is a miss."""
        assert target_location is not None, "SGLang gives a page of its own"
        page = target_location.view(self.cache.spec.shape)
        found = self.cache.load_keys(self.cache.spec.root, self._keys([key]), out=[page]).blocks
        return target_location if found else None

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Run `get` for each, up to the first miss."""
        found: list[torch.Tensor | None] = []
        for key, target in zip(keys, target_locations or (), strict=True):
            missed = bool(found) and found[-1] is None
            found.append(None if missed else self.get(key, target))
        return found

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write a page from a flat tensor, without knowledge of the pages before it."""
        assert value is not None, "SGLang gives a page"
        page = value.view(self.cache.spec.shape)
        return self.cache.save_keys(self.cache.spec.root, self._keys([key]), [page]) == 1

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Run `set` for each, up to the first that fails."""
        return all(self.set(key, value) for key, value in zip(keys, values or (), strict=True))

    def clear(self) -> bool:
        """Drop the first page of every prompt, of all ranks: no page is found without it.

        False, with a line in the log, if a page could not be dropped.
        """
        root = f"{self.cache.path}/{self.cache.spec.root.hex()}"
        try:
            with os.scandir(root) as entries:
                pages = [one.path for one in entries if one.is_file(follow_symlinks=False)]
            for page in pages:
                with contextlib.suppress(FileNotFoundError):  # another rank clears as well
                    os.unlink(page)
        except FileNotFoundError:
            return True
        except OSError as error:
            _log.warning("not cleared: %s: %s", root, error)
            return False
        return True

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _parent(self, extra_info: Any) -> bytes:
        """Return the key before a call's first page; SGLang has None for a prompt's beginning."""
        before = getattr(extra_info, "prefix_keys", None)
        return self._keys(before[-1:])[0] if before else self.cache.spec.root

    def _keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the keys of pages; `hashes` are hexadecimal."""
        root = self.cache.spec.root
        return [xxh3_128_digest(root + bytes.fromhex(one)) for one in hashes]

    def _pages(self, host_indices: torch.Tensor) -> list[torch.Tensor]:
        """Return the pages as views of the pool's memory."""
        size = self.mem_pool_host.page_size
        return [self._page(int(first)) for first in host_indices[::size].tolist()]

    def _page(self, index: int) -> torch.Tensor:
        pool = self.mem_pool_host
        if pool.layout not in AXES:
            raise ValueError(
                f"--hicache-mem-layout {pool.layout}: expected one of {', '.join(AXES)} for kvfs"
            )
        page = pool.get_data_page(index, flat=False)
        if pool.layout in _BY_PAGE:
            page = page.squeeze(page.dim() - len(AXES[pool.layout]) - 1)
        return page  # type: ignore[no-any-return]

    def _axes(self, page: torch.Tensor) -> tuple[str, ...]:
        names: tuple[str, ...] = AXES[self.mem_pool_host.layout]
        names = ("kv", *names) if page.dim() > len(names) else names
        if len(names) != page.dim() or (
            page.shape[names.index("token")] != self.mem_pool_host.page_size
        ):
            raise ValueError(
                f"host pool {type(self.mem_pool_host).__name__}: pages of {tuple(page.shape)}, "
                f"expected {names} with {self.mem_pool_host.page_size} tokens"
            )
        return names
