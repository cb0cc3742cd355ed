"""LMCache: its disk backend, its fs connector, its L2 adapters, and kvfs's own connector in it.

A chunk is the keys and values of 256 tokens of Llama-3.1-8B, 32 MiB, in the staging memory of
LMCache. Each chunk is put and got by one call, as LMCache's engine does. GdsBackend is not here: it
asserts a CUDA device, and needs cudaMemcpy also with `use_gds: false`.
"""

import asyncio
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed
from tests.clients.run_lmcache import Adapter, stored

MODEL, DTYPE = "meta-llama/Llama-3.1-8B", torch.bfloat16
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * DTYPE.itemsize
PLUGIN = "remote_storage_plugin.kvfs"


class _LMCache(Connector):
    """Staging memory, content and keys; `_store` and `_load` are the calls that are timed."""

    def __init__(self, bytes_each: int) -> None:
        tokens = bytes_each // TOKEN
        self._tokens = tokens
        self._shape = torch.Size([2, LAYERS, tokens, KV_HEADS * HEAD_DIM])
        self._content = Content(bytes_each)
        self._metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(LAYERS, 2, tokens, KV_HEADS, HEAD_DIM),
            chunk_size=tokens,
        )
        self._staging = LocalCPUBackend(self._config(), self._metadata, dst_device="cpu")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _config(self, **told: object) -> Any:  # noqa: ANN401 (LMCache's)
        config = {"chunk_size": self._tokens, "local_cpu": False, "max_local_cpu_size": 0.25}
        return LMCacheEngineConfig.from_defaults(**config, **told)

    def put(self, numbers: range) -> list[float]:
        return [self._put(number) for number in numbers]

    def get(self, numbers: range) -> list[float]:
        return [self._get(number) for number in numbers]

    def _memory(self) -> Any:  # noqa: ANN401 (LMCache's)
        found = self._staging.allocate(self._shape, DTYPE, MemoryFormat.KV_2LTD, busy_loop=False)
        assert found is not None, "LMCache's staging memory is full"
        return found

    def _put(self, number: int) -> float:
        memory = self._memory()
        self._content.fill(memory.tensor, number)
        seconds = timed(self._store, number, memory)
        memory.tensor.zero_()
        memory.ref_count_down()
        return seconds

    def _check(self, memory: Any, number: int) -> None:  # noqa: ANN401 (LMCache's)
        if memory is None:
            raise WrongBytesError(f"chunk {number} is missing")
        self._content.check(memory.tensor, number)
        memory.ref_count_down()

    def _get(self, number: int) -> float:
        raise NotImplementedError

    def _store(self, number: int, memory: Any) -> None:  # noqa: ANN401 (LMCache's)
        raise NotImplementedError


class _Backend(_LMCache):
    """A storage backend: it takes puts, and calls back when a chunk is stored."""

    backend: Any

    def _store(self, number: int, memory: Any) -> None:  # noqa: ANN401 (LMCache's)
        done = threading.Event()
        self.backend.batched_submit_put_task(
            [_key(number)], [memory], on_complete_callback=lambda _: done.set()
        )
        done.wait()

    def _get(self, number: int) -> float:
        got: list[Any] = []
        seconds = timed(lambda: got.append(self.backend.get_blocking(_key(number))))
        self._check(got[0], number)
        return seconds


class LocalDisk(_Backend):
    """`local_disk: DIR`; the index is in this process, and begins empty."""

    def start(self, folder: Path) -> None:
        self.backend = LocalDiskBackend(
            self._config(local_disk=str(folder), max_local_disk_size=10.0),
            self._loop,
            self._staging,
            dst_device="cpu",
            metadata=self._metadata,
        )

    def stop(self) -> None:
        self.backend.close()


class Remote(_Backend):
    """`remote_url: fs://...`, FSConnector. Its index is the directory."""

    def start(self, folder: Path) -> None:
        told = {"remote_url": f"fs://localhost:0{folder}/", "remote_serde": "naive"}
        self._connect(self._config(**told))

    def _connect(self, config: Any, plugin: str | None = None) -> None:  # noqa: ANN401 (LMCache's)
        self.backend = RemoteBackend(
            config, self._metadata, self._loop, self._staging, dst_device="cpu", plugin_name=plugin
        )
        assert self.backend.connection is not None, "LMCache made no connection"

    def stop(self) -> None:
        self.backend.close()


class Native(Remote):
    """kvfs's own connector, which LMCache loads as a plugin."""

    def start(self, folder: Path) -> None:
        extra = {
            f"{PLUGIN}.module_path": "kvfs.connectors.lmcache",
            f"{PLUGIN}.class_name": "KvfsAdapter",
            f"{PLUGIN}.path": str(folder),
        }
        told = {"remote_storage_plugins": ["kvfs"], "extra_config": extra, "remote_serde": "naive"}
        self._connect(self._config(**told), "kvfs")


class L2(_LMCache):
    """An L2 adapter of the multi-process mode: in Python (`l2_fs`) or C++ (`l2_fs_native`)."""

    adapter: Adapter

    def __init__(self, bytes_each: int, mode: str) -> None:
        super().__init__(bytes_each)
        self._mode = mode

    def start(self, folder: Path) -> None:
        self.adapter = Adapter(Namespace(dir=folder, mode=self._mode, odirect=False))

    def stop(self) -> None:
        self.adapter.real.close()

    def _store(self, number: int, memory: Any) -> None:  # noqa: ANN401 (LMCache's)
        if not stored(self.adapter.store(_object(number), memory)):
            raise WrongBytesError(f"chunk {number} was not stored")

    def _get(self, number: int) -> float:
        if not self.adapter.lookup([_object(number)]):
            raise WrongBytesError(f"chunk {number} is missing")
        memory = self._memory()
        seconds = timed(self.adapter.load, _object(number), memory)
        self._check(memory, number)
        return seconds


def _key(number: int) -> CacheEngineKey:
    return CacheEngineKey(MODEL, 1, 0, 0x1234567890ABCDEF0000 + number, DTYPE)


def _object(number: int) -> ObjectKey:
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name=MODEL, kv_rank=0x01000100)
