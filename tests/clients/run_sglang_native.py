"""Drives SGLang 0.5.23's storage controller and host pools with kvfs's own backend.

    run_sglang_native.py DIR --config FILE [--layout page_first] [--mla] [--interface 0|1]
                             [--pages N] [--rank R --ranks N] [--dtype bfloat16]
                             [--keep] [--reader] [--lossy]

FILE is the output of `kvfs connect sglang --native`. SGLang parses its extra config, and SGLang's
factory loads its backend. The real controller then backs up pages from a host pool, and asks which
pages are there (from the first page, and from behind some). It brings them back into other places
of the pool. With --keep pages stay. With --reader, in another process, it must find the pages that
--keep left. With --lossy pages may be missing, but pages that SGLang finds, and gets, must be
right. Prints one JSON line; exits 0 when all content was right, 1 on any mismatch or miss.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401  (its output is its verdict; SGLang's classes have no types here)

import argparse
import json
import logging
import os
import shlex
import sys
import threading
import time
import zlib
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import sglang_pools
import torch

PAGE, LAYERS, HEADS, DIM = 16, 4, 2, 64
LATENT = 576  # of DeepSeek's MLA
BEHIND = 5  # pages that a second request has in memory already
FLAG = "--hicache-storage-backend-extra-config"
MODEL = "meta-llama/Llama-3.1-8B"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=lambda text: Path(text).absolute())
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layout", default="page_first")
    parser.add_argument("--mla", action="store_true")
    parser.add_argument("--interface", type=int, help="interface_v1, instead of what FILE says")
    parser.add_argument("--pages", type=int, default=300, help="more than two batches of SGLang")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--reader", action="store_true")
    parser.add_argument("--lossy", action="store_true")
    return parser.parse_args()


def host_pool(sglang: SimpleNamespace, options: argparse.Namespace) -> Any:
    """SGLang's pool of pages in host memory, for twice as many pages as the run has."""
    cls = sglang.mla if options.mla else sglang.mha
    pool = cls.__new__(cls)  # its constructor captures a device's buffers
    pages = 2 * options.pages
    pool.__dict__.update(
        layout=options.layout,
        page_size=PAGE,
        page_num=pages,
        size=pages * PAGE,
        layer_num=LAYERS,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        kv_cache_dim=LATENT,
        dtype=getattr(torch, options.dtype),
        device="cpu",
        pin_memory=False,
        allocator=SimpleNamespace(allocate=lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)),
        _transfer_device=torch.device("cpu"),
    )
    pool.kv_buffer = pool.init_kv_buffer()
    return pool


def storage_config(sglang: SimpleNamespace, options: argparse.Namespace, extra: Any) -> Any:
    return sglang.storage.HiCacheStorageConfig(
        tp_rank=options.rank,
        tp_size=options.ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=options.mla,
        enable_storage_metrics=False,
        is_page_first_layout=options.layout == "page_first",
        model_name=options.model,
        extra_config=extra,
    )


class Run:
    """A controller without a device, its pool, and the verdict."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.errors: list[str] = []
        sglang = sglang_pools.load()
        self.sglang = sglang
        words = shlex.split(options.config.read_text().replace("\\\n", ""), comments=True)
        extra, *_, passed = sglang.hybrid.parse_storage_backend_extra_config(
            words[words.index(FLAG) + 1]
        )
        assert "path" in extra
        if options.interface is not None:
            extra["interface_v1"], passed = options.interface, bool(options.interface)
        self.passed = passed
        self.pool = host_pool(sglang, options)
        config = storage_config(sglang, options, extra)
        controller = sglang.controller.HiCacheController
        self.controller = controller.__new__(controller)
        self.controller.__dict__.update(
            page_size=PAGE,
            storage_config=config,
            storage_host_pool=self.pool,
            mem_pool_host=self.pool,
            prefetch_sync_queue=Queue(),
            storage_backend=sglang.factory.create_backend("dynamic", config, self.pool),
        )
        self.controller.storage_backend.register_mem_pool_host(self.pool)
        self.controller.storage_backend.on_host_pools_registered()
        way = "zero_copy" if extra["interface_v1"] else "generic"
        get, set_ = {
            "zero_copy": ("_page_get_zero_copy", "_page_set_zero_copy"),
            "generic": ("_generic_page_get", "_generic_page_set"),
        }[way]
        self.controller.page_get_func = getattr(self.controller, get)
        self.controller.page_set_func = getattr(self.controller, set_)
        self.tokens = list(range(options.pages * PAGE))
        self.hashes = sglang_pools.page_hashes(self.tokens, page_size=PAGE)
        self.seconds: dict[str, float] = {}

    def check(self, condition: object, what: str) -> None:
        if not condition:
            self.errors.append(what)

    def page(self, index: int) -> torch.Tensor:
        view: torch.Tensor = self.pool.get_data_page(index * PAGE, flat=False)
        return view

    def content(self, number: int) -> torch.Tensor:
        """The content of page `number` for this rank and configuration."""
        like, options = self.page(0), self.options
        of = f"{number} {options.rank} {options.layout} {options.dtype} {options.model}"
        generator = torch.Generator().manual_seed(zlib.crc32(of.encode()))
        count = like.numel() * like.element_size()
        made = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        return made.view(like.dtype).view(like.shape)

    def indices(self, first: int, count: int) -> torch.Tensor:
        """The indices of the tokens of pool pages, in reverse: pages need not follow each other."""
        pages = torch.arange(first + count - 1, first - 1, -1)
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def back_up(self) -> None:
        count = self.options.pages
        for number in range(count):
            self.page(count - 1 - number).copy_(self.content(number))
        operation = self.sglang.controller.StorageOperation(
            self.indices(0, count),
            self.tokens,
            hash_value=self.hashes,
            prefix_keys=[] if self.passed else None,
        )
        start = time.perf_counter()
        self.controller._page_backup(operation)
        self.seconds["backup"] = time.perf_counter() - start
        done = operation.completed_tokens
        self.check(self.options.lossy or done == len(self.tokens), f"backed up {done} tokens")

    def restore(self, behind: int) -> int:
        """Ask for all pages behind the first ones, and fetch them; return their number."""
        prefix = self.hashes[:behind]
        operation = self.sglang.controller.PrefetchOperation(
            "request",
            self.tokens[behind * PAGE :],
            prefix[-1] if prefix else None,
            prefix if self.passed else None,
        )
        start = time.perf_counter()
        hashes, hit = self.controller._storage_hit_query(operation)
        self.seconds["query"] = time.perf_counter() - start
        found = len(hashes)
        self.check(hit == found * PAGE, f"{hit} tokens in {found} pages")
        self.check(hashes == self.hashes[behind : behind + found], "hashes of the pages found")
        self.pool.kv_buffer.zero_()
        operation.hash_value = hashes
        operation.host_indices = self.indices(self.options.pages, found)
        start = time.perf_counter()
        brought = self.controller._page_transfer(operation)
        self.seconds["transfer"] = time.perf_counter() - start
        self.check(self.options.lossy or brought == found, f"brought {brought} of {found} pages")
        for number in range(brought):
            page = self.page(self.options.pages + found - 1 - number)
            same = torch.equal(
                page.contiguous().view(torch.uint8),
                self.content(behind + number).view(torch.uint8),
            )
            self.check(same, f"content {behind + number}")
        return found

    def finish(self, found: int) -> int:
        backend, options = self.controller.storage_backend, self.options
        page = self.page(0)
        size = page.numel() * page.element_size()
        result: dict[str, Any] = {
            "lib": "sglang",
            "cls": type(backend).__name__,
            "layout": options.layout,
            "page_bytes": size,
            "pages": options.pages,
            "found": found,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "stats": backend.cache.stats.as_dict(),
            "root": backend.cache.spec.root.hex(),
            "fingerprint": str(backend.cache.spec.fingerprint),
            "threads": threading.active_count(),
        }
        if not options.keep:
            self.check(backend.clear(), "clear")
            self.check(self.restore(0) == 0, "pages found after clear")
        backend.close()
        result |= {"ok": not self.errors, "errors": self.errors[:5]}
        print(json.dumps(result), flush=True)
        return 1 if self.errors else 0


def main() -> int:
    logging.basicConfig(level=logging.ERROR)
    run = Run(arguments())
    if not run.options.reader:
        run.check(run.options.lossy or run.restore(0) == 0, "found before backup")
        run.back_up()
        if not run.options.lossy:
            run.back_up()  # all are there already
    found = run.restore(0)
    if not run.options.lossy:
        run.check(found == run.options.pages, f"found {found} of {run.options.pages} pages")
        behind = run.restore(BEHIND)
        run.check(behind == found - BEHIND, f"found {behind} pages behind {BEHIND}")
    return run.finish(found)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
