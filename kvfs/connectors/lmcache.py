"""LMCache on a kvfs namespace: a remote storage plugin, for LMCache 0.5.6.

LMCache loads it by `remote_storage_plugins: ["kvfs"]`; `kvfs connect lmcache NAMESPACE --native`
prints the rest. The options stand below `remote_storage_plugin.kvfs.` of its `extra_config`:

- `path`: the namespace's directory.
- `threads` (8): the chunks in flight.
- `revision`, `tokenizer` and `adapter`: parts of the fingerprint.

A chunk is a block. Its key is XXH3-128 over the root key and LMCache's own key without the rank.
LMCache does not tell the chunk before a chunk, nor its place in the prompt. So all chunks are
beside each other, in the root's directory, and kvfs does not know which chunk others build on.

Contract: a failure of the mount is a miss. LMCache must hand over whole chunks of one group of
layers, unchanged. Chunks by layer, a serde and several groups are refused at the start, in one line
of LMCache's log; LMCache goes on without kvfs. A chunk that is not full is not stored.
"""

# ruff: noqa: ANN401, ARG002, FBT001, FBT002 (LMCache's signatures)

import asyncio
import builtins
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from xxhash import xxh3_128_digest

from kvfs import prefix
from kvfs.client import PrefixCache, Spec, SpecMismatchError

NAME = "kvfs"  # of the plugin, or the part before a dot in it
THREADS = 8
_IDENTITY = ("revision", "tokenizer", "adapter")
T = TypeVar("T")


class KvfsAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache is not there to be checked
    """Makes connectors for LMCache: one for each plugin `kvfs` or `kvfs.NAME`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{NAME}")

    def create_connector(self, context: Any) -> "KvfsConnector":
        """Return a connector. Raises IrrecoverableException with the reason, which LMCache logs."""
        options = f"remote_storage_plugin.{context.plugin_name or NAME}."
        told = context.config.extra_config or {}
        try:
            return KvfsConnector(
                context,
                {
                    name.removeprefix(options): value
                    for name, value in told.items()
                    if name.startswith(options)
                },
            )
        except (OSError, TypeError, ValueError, SpecMismatchError) as error:
            raise IrrecoverableException(f"kvfs: {error}") from error


class KvfsConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of one model, one dtype and one chunk size in one namespace."""

    def __init__(self, context: Any, told: dict[str, Any]) -> None:
        """Open the namespace. Raises OSError, TypeError, ValueError and SpecMismatchError."""
        config, metadata = context.config, context.metadata
        super().__init__(config, metadata)
        for name, found, wanted in (
            ("use_layerwise", config.use_layerwise, False),
            ("remote_serde", config.remote_serde, "naive"),
            ("groups of layers", len(self.meta_shapes), 1),
        ):
            if found != wanted:
                raise ValueError(f"{name}={found!r} of LMCache: expected {wanted!r}")
        path = told.get("path")
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"remote_storage_plugin.kvfs.path={path!r} in LMCache's extra_config: expected the "
                "directory of a kvfs namespace"
            )
        (shape,) = self.meta_shapes
        # All ranks have the same latents, so LMCache reads and writes those of the first rank.
        first_only = metadata.use_mla and config.get_extra_config_value(
            "remote_enable_mla_worker_id_as0", metadata.use_mla
        )
        shards = 1 if first_only else metadata.world_size
        threads = told.get("threads", THREADS)
        self._spec = Spec(
            model=metadata.model_name,
            **{name: told.get(name, "") for name in _IDENTITY},
            dtype=self.meta_dtypes[0],
            axes=dict(zip(("kv", "layer", "token", "hidden"), shape, strict=True)),
            shards=shards,
        )
        shard = metadata.worker_id if shards > 1 else None
        self._cache = PrefixCache(path, self._spec, shard=shard, threads=1)
        self._memory = context.local_cpu_backend
        # LMCache calls for single chunks, so calls run side by side.
        self._threads = ThreadPoolExecutor(threads, "kvfs-lmcache")

    async def exists(self, key: Any) -> bool:
        return await self._run(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self._is_cached(self._key(key))

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Return the number of chunks, from the first, that all ranks have."""
        for at, key in enumerate(keys):
            if not self._is_cached(self._key(key)):
                return at
        return len(keys)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        return await self._run(self.batched_contains, keys)

    async def get(self, key: Any) -> Any:
        """Return a chunk in LMCache's memory, or None: a miss, or no memory."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> builtins.list[Any]:
        """Return each chunk, or None. A cancelled call releases the memory that it took."""
        begun = [self._threads.submit(self._load, self._key(key)) for key in keys]
        try:
            return [await asyncio.wrap_future(one) for one in begun]
        except BaseException:
            for one in begun:
                one.cancel()
                one.add_done_callback(_release)
            raise

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Any]
    ) -> builtins.list[Any]:
        """Return the chunks before the first that is missing."""
        found = await self.batched_get(keys)
        count = next((at for at, memory in enumerate(found) if memory is None), len(found))
        for memory in found[count:]:
            if memory is not None:
                memory.ref_count_down()
        return found[:count]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Save a chunk. The connector holds its memory until it is written, even after a cancel.

        There is no batched put: LMCache counts chunks in flight only if it hands them over one by
        one, and these go side by side as well.
        """
        memory_obj.ref_count_up()
        begun = self._threads.submit(self._save, self._key(key), memory_obj)
        begun.add_done_callback(lambda _: memory_obj.ref_count_down())
        await asyncio.wrap_future(begun)

    def remove_sync(self, key: Any) -> bool:
        """Unlink this rank's part of a chunk, which makes the chunk a miss for all ranks."""
        name = prefix.path(self._spec.root, self._key(key), self._cache.shard or "")
        try:
            os.unlink(f"{self._cache.path}/{name}")
        except OSError:
            return False
        return True

    async def list(self) -> builtins.list[str]:
        """Return the names of chunks' files; LMCache's keys cannot be had from them."""
        return await self._run(self._names)

    async def close(self) -> None:
        self._threads.shutdown()
        self._cache.close()

    def _key(self, key: Any) -> bytes:
        """Return a block's key: of model, world, chunk, dtype and tags, but no rank."""
        whole = key.with_new_worker_id(0).to_string()
        return xxh3_128_digest(self._spec.root + whole.encode())

    def _is_cached(self, key: bytes) -> bool:
        return self._cache.match_keys(self._spec.root, [key]).blocks == 1

    def _load(self, key: bytes) -> Any:
        if not self._is_cached(key):  # before the connector takes memory, for which LMCache evicts
            return None
        memory = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if memory is None:
            return None
        loaded = 0
        try:
            loaded = self._cache.load_keys(self._spec.root, [key], out=[memory.tensor]).blocks
        finally:
            if not loaded:
                memory.ref_count_down()
        return memory if loaded else None

    def _save(self, key: bytes, memory: Any) -> None:
        chunk = memory.tensor
        if chunk.shape == self._spec.shape and memory.get_memory_format() == self.meta_fmt:
            self._cache.save_keys(self._spec.root, [key], [chunk])

    def _names(self) -> builtins.list[str]:
        try:
            return os.listdir(f"{self._cache.path}/{self._spec.root.hex()}")
        except OSError:
            return []

    async def _run(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.wrap_future(self._threads.submit(call, *args))


def _release(loaded: "Future[Any]") -> None:
    """Release memory that was loaded after its caller had left."""
    if not loaded.cancelled() and loaded.exception() is None and loaded.result() is not None:
        loaded.result().ref_count_down()
