"""Drives the real LMCache 0.5.6 storage classes on a directory: CPU tensors, no model, no GPU.

    run_lmcache.py DIR [--mode local_disk|fs|l2_fs|l2_fs_native|native] [--chunks N] [--odirect]
                       [--keep] [--reader] [--config FILE] [--lossy]

Modes:

- local_disk: LocalDiskBackend (`local_disk: DIR`). Its index is in memory only.
- fs: RemoteBackend with FSConnector (`remote_url: fs://...`). Its index: the file exists.
- l2_fs: FSL2Adapter of the multi-process mode (`{"type": "fs", "base_path": DIR}`).
- l2_fs_native: the same in C++ (`{"type": "fs_native"}`).
- native: RemoteBackend with kvfs's own connector, which LMCache loads by --config.

Puts, looks up, reads back, compares and removes. With --keep the files stay. With --reader, in
another process, it puts nothing and must find the files that --keep left (content is a function of
the key). In local_disk mode --reader must find nothing, because that backend never looks at the
files in its directory.

LMCache's own configuration comes from --config, or else follows from the other options. With
--lossy chunks may be missing, or be there already, but each chunk that LMCache reports must be
there. Prints one JSON line; exits 0 when all content was right, 1 on any mismatch or miss.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401  (its output is its verdict; LMCache's classes have no types here)

import argparse
import asyncio
import hashlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # read while LMCache is being imported
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import fs_native_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
MODEL = "meta-llama/Llama-3.1-8B"
POLL = 0.0005


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=lambda text: Path(text).absolute())
    parser.add_argument(
        "--mode",
        default="local_disk",
        choices=["local_disk", "fs", "l2_fs", "l2_fs_native", "native"],
    )
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--odirect", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the files for a reader")
    parser.add_argument("--reader", action="store_true", help="find what --keep left")
    parser.add_argument("--config", type=Path, help="what `kvfs ns create --for` printed")
    parser.add_argument("--lossy", action="store_true", help="somebody drops or adds chunks")
    parser.add_argument("--model", default=MODEL)
    return parser.parse_args()


class Run:
    """The common part of both kinds of LMCache interface: memory, content, timing and verdict."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.errors: list[str] = []
        self.put_seconds = self.get_seconds = 0.0
        self.shape = torch.Size([2, options.layers, options.tokens, KV_HEADS * HEAD_DIM])
        self.chunk_bytes = self.shape.numel() * DTYPE.itemsize
        self.config = self._config()
        self.metadata = LMCacheMetadata(
            model_name=options.model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(options.layers, 2, options.tokens, KV_HEADS, HEAD_DIM),
            chunk_size=options.tokens,
        )
        self.staging = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.result: dict[str, Any] = {
            "lib": "lmcache",
            "mode": options.mode,
            "dir": str(options.dir),
            "odirect": options.odirect,
            "chunk_bytes": self.chunk_bytes,
            "chunks": options.chunks,
            "reader": options.reader,
        }

    def _config(self) -> Any:
        if self.options.config is None:
            return LMCacheEngineConfig.from_defaults(**self._settings())
        config = LMCacheEngineConfig.from_file(str(self.options.config))
        config.chunk_size = self.options.tokens
        config.local_cpu, config.max_local_cpu_size = False, 2.0
        if self.options.mode == "native":  # which allocates this twice
            config.max_local_cpu_size = 0.5
        return config

    def _settings(self) -> dict[str, Any]:
        options = self.options
        extra = {"use_odirect": options.odirect, "fs_connector_use_odirect": options.odirect}
        if options.odirect:
            extra["save_chunk_meta"] = False  # FSConnector refuses O_DIRECT with its 28-byte header
        settings: dict[str, Any] = {
            "chunk_size": options.tokens,
            "local_cpu": False,
            "max_local_cpu_size": 2.0,
            "extra_config": extra,
        }
        if options.mode == "local_disk":
            settings |= {"local_disk": str(options.dir), "max_local_disk_size": 10.0}
        if options.mode == "fs":
            settings |= {"remote_url": f"fs://localhost:0{options.dir}/", "remote_serde": "naive"}
        return settings

    def check(self, condition: object, what: str) -> None:
        if not condition:
            self.errors.append(what)

    def content(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + index)
        return torch.randint(0, 256, (self.chunk_bytes,), dtype=torch.uint8, generator=generator)

    def empty(self) -> Any:
        memory = self.staging.allocate(self.shape, DTYPE, MemoryFormat.KV_2LTD, busy_loop=False)
        assert memory is not None, "LMCache's staging pool is exhausted"
        return memory

    def filled(self, index: int) -> Any:
        memory = self.empty()
        memory.tensor.view(torch.uint8).flatten().copy_(self.content(index))
        return memory

    def same(self, memory: Any, index: int) -> bool:
        if memory is None:
            return False
        found = memory.tensor.contiguous().view(torch.uint8).flatten()
        return torch.equal(found, self.content(index))

    def finish(self) -> int:
        gigabytes = self.chunk_bytes * self.options.chunks / 1e9
        if self.put_seconds:
            self.result["put_GBps"] = round(gigabytes / self.put_seconds, 3)
        if self.get_seconds and self.result.get("hits"):
            self.result["get_GBps"] = round(gigabytes / self.get_seconds, 3)
        self.result["left_in_dir"] = len(os.listdir(self.options.dir))
        self.result["ok"] = not self.errors
        self.result["errors"] = self.errors[:5]
        print(json.dumps(self.result), flush=True)
        return 1 if self.errors else 0


def first_files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))[:2]


def put_all(run: Run, backend: Any, keys: list[CacheEngineKey]) -> None:
    for index, key in enumerate(keys):
        run.check(run.options.lossy or not backend.contains(key), f"contains before put {index}")
    for index, key in enumerate(keys):
        memory = run.filled(index)
        start = time.perf_counter()
        backend.batched_submit_put_task([key], [memory])
        while backend.exists_in_put_tasks(key):
            time.sleep(POLL)
        run.put_seconds += time.perf_counter() - start
        memory.ref_count_down()


def get_all(run: Run, backend: Any, keys: list[CacheEngineKey], *, blind: bool) -> None:
    found = [backend.contains(key) for key in keys]
    run.result["hits"] = hits = sum(found)
    expected = 0 if blind else hits if run.options.lossy else len(keys)
    run.check(hits == expected, f"contains after put: {hits} of {len(keys)}, expected {expected}")
    for index, key in enumerate(keys):
        if run.options.lossy and not found[index]:
            continue
        start = time.perf_counter()
        memory = backend.get_blocking(key)
        run.get_seconds += time.perf_counter() - start
        if memory is None:
            run.check(blind, f"get {index} returned None")
            continue
        run.check(run.same(memory, index), f"content {index}")
        memory.ref_count_down()


def get_batch(run: Run, backend: Any, keys: list[CacheEngineKey]) -> None:
    start = time.perf_counter()
    batch = backend.batched_get_blocking(keys)
    run.result["batched4_s"] = round(time.perf_counter() - start, 4)
    for index, memory in enumerate(batch):
        run.check(run.same(memory, index), f"batched content {index}")
        if memory is not None:
            memory.ref_count_down()


def prefix(run: Run, backend: Any, keys: list[CacheEngineKey], loop: Any) -> int:
    """The number of chunks from the first on; all of LMCache's ways to ask must agree."""
    count = backend.batched_contains(keys)

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    also = wait(backend.batched_async_contains("lookup", keys))
    run.check(also == count, f"batched_async_contains: {also}, batched_contains: {count}")
    for _ in range(8):  # of what is loaded beyond the first gap, no memory stays taken
        loaded = wait(backend.batched_get_non_blocking("lookup", keys))
        run.check(len(loaded) == count, f"batched_get_non_blocking: {len(loaded)} of {count}")
        for index, memory in enumerate(loaded):
            run.check(run.same(memory, index), f"content {index}")
            memory.ref_count_down()
    return int(count)


def drive_backend(run: Run) -> None:
    """local_disk and fs: LMCache's storage backends."""
    options = run.options
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    private = options.mode == "local_disk"  # known to the process that wrote it, to no other
    blind = options.reader and private
    backend: Any
    if private:
        backend = LocalDiskBackend(
            run.config, loop, run.staging, dst_device="cpu", metadata=run.metadata
        )
    elif options.mode == "native":
        backend = CreateStorageBackends(run.config, run.metadata, loop, "cpu")["RemoteBackend-kvfs"]
    else:
        backend = RemoteBackend(run.config, run.metadata, loop, run.staging, dst_device="cpu")
    if not private:
        assert backend.connection is not None, "the connector did not start"
    keys = [
        CacheEngineKey(options.model, 1, 0, 0x1234567890ABCDEF0000 + index, DTYPE)
        for index in range(options.chunks)
    ]

    if not options.reader:
        put_all(run, backend, keys)
    get_all(run, backend, keys, blind=blind)
    if not options.reader and not options.lossy:
        get_batch(run, backend, keys[:4])
    if options.mode == "native":
        run.result["prefix"] = prefix(run, backend, keys, loop)
    run.result["files"] = first_files(options.dir)
    if private:  # no other LMCache process can check these files: say what must be in them
        run.result["sha256"] = [
            hashlib.sha256(run.content(index).numpy()).hexdigest() for index in range(len(keys))
        ]
    if not options.keep and not blind:
        remove: Callable[[CacheEngineKey], bool]
        remove = backend.remove if private else backend.connection.remove_sync
        for index, key in enumerate(keys):
            run.check(remove(key), f"remove {index}")
            run.check(not backend.contains(key), f"contains after remove {index}")


class Adapter:
    """An L2 adapter's submit / wait / query calls, each as one blocking call."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = {"base_path": str(options.dir), "use_odirect": options.odirect}
        self.real: Any
        if options.mode == "l2_fs":
            self.real = FSL2Adapter(FSL2AdapterConfig.from_dict(settings))
        else:
            self.real = fs_native_l2_adapter._create_fs_native_l2_adapter(
                fs_native_l2_adapter.FSNativeL2AdapterConfig.from_dict(settings)
            )

    @staticmethod
    def _wait(event: int) -> None:
        select.select([event], [], [], 60)
        os.read(event, 8)

    def lookup(self, keys: list[ObjectKey]) -> int:
        task = self.real.submit_lookup_and_lock_task(keys, {})
        self._wait(self.real.get_lookup_and_lock_event_fd())
        while (found := self.real.query_lookup_and_lock_result(task)) is None:
            time.sleep(POLL)
        hits = sum(bool(found.test(index)) for index in range(len(keys)))
        self.real.submit_unlock(keys)
        return hits

    def store(self, key: ObjectKey, memory: Any) -> Any:
        task = self.real.submit_store_task([key], [memory])
        self._wait(self.real.get_store_event_fd())
        while task not in (completed := self.real.pop_completed_store_tasks()):
            time.sleep(POLL)
        return completed[task]

    def load(self, key: ObjectKey, memory: Any) -> bool:
        task = self.real.submit_load_task([key], [memory])
        self._wait(self.real.get_load_event_fd())
        while (loaded := self.real.query_load_result(task)) is None:
            time.sleep(POLL)
        return bool(loaded.test(0))


def stored(outcome: Any) -> bool:
    """Whether a store succeeded; some adapters give an attribute, others a method."""
    if getattr(outcome, "success", True) is True:
        return True
    return bool(getattr(outcome, "is_success", lambda: True)())


def drive_adapter(run: Run) -> None:
    """l2_fs and l2_fs_native: the adapters of LMCache's multi-process mode."""
    options, check = run.options, run.check
    adapter = Adapter(options)
    keys = [
        ObjectKey(
            chunk_hash=(0xABC0 + index).to_bytes(32, "big"),
            model_name=options.model,
            kv_rank=0x01000100,
        )
        for index in range(options.chunks)
    ]
    if not options.reader:
        check(adapter.lookup(keys) == 0, "lookup before put")
        for index, key in enumerate(keys):
            memory = run.filled(index)
            start = time.perf_counter()
            outcome = adapter.store(key, memory)
            run.put_seconds += time.perf_counter() - start
            check(stored(outcome), f"store {index}: {outcome}")
            memory.ref_count_down()

    hits = adapter.lookup(keys)
    run.result["hits"] = hits
    check(hits == len(keys), f"lookup: {hits} of {len(keys)}")
    for index, key in enumerate(keys):
        memory = run.empty()
        start = time.perf_counter()
        loaded = adapter.load(key, memory)
        run.get_seconds += time.perf_counter() - start
        check(loaded and run.same(memory, index), f"content {index}")
        memory.ref_count_down()

    run.result["files"] = first_files(options.dir)
    if not options.keep:
        adapter.real.delete(keys)
        deadline = time.monotonic() + 10
        while (left := adapter.lookup(keys)) and time.monotonic() < deadline:
            time.sleep(POLL)
        check(left == 0, f"lookup after delete: {left}")
    adapter.real.close()


def main() -> int:
    logging.disable(logging.INFO)
    run = Run(arguments())
    if run.options.mode in {"local_disk", "fs", "native"}:
        drive_backend(run)
    else:
        drive_adapter(run)
    return run.finish()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # LMCache's threads do not end by themselves
