"""SGLang's HiCacheFile: a file for each page, `--hicache-storage-backend file`.

A page is the keys and values of `page_tokens` tokens of Llama-3.1-8B: 128 KiB for each token.
SGLang sets and gets one page after the other.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed
from tests.clients.run_sglang_hicache import hicache_module

TOKEN = 128 << 10


class SGLangFile(Connector):
    """HiCacheFile, one rank."""

    def __init__(self, bytes_each: int) -> None:
        self._module: Any = hicache_module(full_import=False)
        self._content = Content(bytes_each)
        self._page = torch.zeros(bytes_each // 2, dtype=torch.bfloat16)
        self._cache: Any = None

    def start(self, folder: Path) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder)
        config = storage_config(self._module, page_first=False, extra=None)
        self._cache = self._module.HiCacheFile(config)

    def put(self, numbers: range) -> list[float]:
        return [self._put(number) for number in numbers]

    def get(self, numbers: range) -> list[float]:
        if self._cache.batch_exists([_key(number) for number in numbers]) != len(numbers):
            raise WrongBytesError("pages are missing")
        return [self._get(number) for number in numbers]

    def _put(self, number: int) -> float:
        self._content.fill(self._page, number)
        seconds = timed(self._cache.set, _key(number), self._page)
        self._page.zero_()
        return seconds

    def _get(self, number: int) -> float:
        seconds = timed(self._cache.get, _key(number), self._page)
        self._content.check(self._page, number)
        return seconds


def storage_config(module: Any, *, page_first: bool, extra: dict[str, Any] | None) -> Any:  # noqa: ANN401
    """Return the configuration that SGLang gives a storage class of one rank.

    module: SGLang's own, which has no types.
    """
    return module.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=page_first,
        model_name="meta-llama/Llama-3.1-8B",
        extra_config=extra,
    )


def _key(number: int) -> str:
    return hashlib.sha256(b"page %d" % number).hexdigest()
