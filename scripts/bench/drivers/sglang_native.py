"""kvfs's own backend in SGLang: pages of SGLang's host pool, one call for 16 of them.

The pool is SGLang's, with the layout page_first, 8 MiB a page of 64 tokens of Llama-3.1-8B. Keys
are hashes as SGLang chains them, and each call names the pages before its first.
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed
from scripts.bench.drivers.sglang_file import storage_config
from tests.clients import sglang_pools

LAYERS, HEADS, DIM = 32, 8, 128
TOKEN = 2 * LAYERS * HEADS * DIM * 2
CALL = 16  # pages


class SGLangNative(Connector):
    """KvfsHiCache, loaded by SGLang's factory, with `interface_v1`."""

    def __init__(self, bytes_each: int) -> None:
        self._sglang = sglang_pools.load()
        self._content = Content(bytes_each)
        self._tokens = bytes_each // TOKEN
        self._page = torch.zeros(bytes_each // 2, dtype=torch.bfloat16)
        pool = self._pool = self._sglang.mha.__new__(self._sglang.mha)  # without a device's buffers
        pool.__dict__.update(
            layout="page_first",
            page_size=self._tokens,
            page_num=CALL,
            size=CALL * self._tokens,
            layer_num=LAYERS,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.bfloat16,
            device="cpu",
            pin_memory=False,
            allocator=SimpleNamespace(
                allocate=lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)
            ),
            _transfer_device=torch.device("cpu"),
        )
        pool.kv_buffer = pool.init_kv_buffer()

    def start(self, folder: Path) -> None:
        extra = {
            "backend_name": "kvfs",
            "module_path": "kvfs.connectors.sglang",
            "class_name": "KvfsHiCache",
            "interface_v1": 1,
            "path": str(folder),
        }
        config = storage_config(self._sglang.storage, page_first=True, extra=extra)
        self._cache: Any = self._sglang.factory.create_backend("dynamic", config, self._pool)
        self._cache.register_mem_pool_host(self._pool)

    def stop(self) -> None:
        self._cache.close()

    def put(self, numbers: range) -> list[float]:
        seconds = []
        for call in _calls(numbers):
            for at, number in enumerate(call):
                self._content.fill(self._page, number)
                self._of_pool(at).copy_(self._page.view(self._of_pool(at).shape))
            arguments = self._arguments(call, numbers)
            seconds.append(timed(self._all, self._cache.batch_set_v1, arguments))
        return seconds

    def get(self, numbers: range) -> list[float]:
        seconds = []
        for call in _calls(numbers):
            self._pool.kv_buffer.zero_()
            keys, indices, extra = self._arguments(call, numbers)
            if self._cache.batch_exists(keys, extra) != len(keys):
                raise WrongBytesError("pages are missing")
            seconds.append(timed(self._all, self._cache.batch_get_v1, (keys, indices, extra)))
            for at, number in enumerate(call):
                self._page.view(self._of_pool(at).shape).copy_(self._of_pool(at))
                self._content.check(self._page, number)
        return seconds

    def _all(self, call: Any, arguments: tuple[Any, ...]) -> None:  # noqa: ANN401 (SGLang's)
        if not all(call(*arguments)):
            raise WrongBytesError("a page was not stored or not found")

    def _arguments(self, call: range, numbers: range) -> tuple[list[str], torch.Tensor, Any]:
        before = [_key(call[0] - 1)] if call[0] > numbers[0] else []
        extra = self._sglang.storage.HiCacheStorageExtraInfo(prefix_keys=before)
        return [_key(number) for number in call], torch.arange(len(call) * self._tokens), extra

    def _of_pool(self, at: int) -> torch.Tensor:
        page: torch.Tensor = self._pool.get_data_page(at * self._tokens, flat=False)
        return page


def _calls(numbers: range) -> list[range]:
    return [numbers[at : at + CALL] for at in range(0, len(numbers), CALL)]


def _key(number: int) -> str:
    return hashlib.sha256(b"page %d" % number).hexdigest()
