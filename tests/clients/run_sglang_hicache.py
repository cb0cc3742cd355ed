"""Drives the real SGLang 0.5.23 HiCacheFile on a directory: CPU tensors, no model, no GPU.

    run_sglang_hicache.py DIR [--pages N] [--page-tokens T] [--layers L] [--keep] [--reader]
                              [--max-size 200M] [--min-free 1G] [--meta-cache] [--lossy]

A page is the keys and values of --page-tokens tokens, all layers, one tensor-parallel rank: 64
tokens of Llama-3.1-8B are 8 MiB. Sets, looks up, reads back, compares and clears. With --keep the
files stay. With --reader, in another process, it sets nothing and must find the files that --keep
left. With --lossy pages may be missing, but each page that SGLang reports must be there. Prints one
JSON line; exits 0 when all content was right, 1 on any mismatch or miss.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401  (its output is its verdict; SGLang's classes have no types here)

import argparse
import ast
import decimal
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

KV_HEADS, HEAD_DIM = 8, 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=lambda text: Path(text).absolute())
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--keep", action="store_true", help="leave the files for a reader")
    parser.add_argument("--reader", action="store_true", help="find what --keep left")
    parser.add_argument("--lossy", action="store_true", help="somebody else evicts")
    parser.add_argument("--max-size", help="SGLang's own eviction: bytes")
    parser.add_argument("--min-free", help="SGLang's own eviction: bytes that must stay free")
    parser.add_argument("--meta-cache", action="store_true", help="SGLang's cache of lookups")
    parser.add_argument("--full-import", action="store_true", help="import all of sglang")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    return parser.parse_args()


def hicache_module(*, full_import: bool) -> types.ModuleType:
    """SGLang's module with HiCacheFile.

    Importing sglang itself needs triton, a GPU's libraries and more. HiCacheFile needs three of its
    modules, which are imported unchanged below empty packages. Of the fourth (utils.common) it
    needs one function, which is taken from there.
    """
    name = "sglang.srt.mem_cache.hicache_storage"
    if full_import:
        return importlib.import_module(name)
    specification = importlib.util.find_spec("sglang")
    assert specification is not None, "sglang is not installed"
    assert specification.origin is not None
    root = Path(specification.origin).parent
    for package in ("", "srt", "srt.mem_cache", "srt.utils", "srt.mem_cache.storage"):
        module = types.ModuleType(".".join(filter(None, ("sglang", package))))
        module.__path__ = [str(root.joinpath(*package.split(".")))]
        sys.modules[module.__name__] = module
    common = types.ModuleType("sglang.srt.utils.common")
    common.__dict__.update(re=re, argparse=argparse, Decimal=decimal.Decimal)
    functions = [
        node
        for node in ast.parse((root / "srt/utils/common.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "human_readable_int"
    ]
    code = compile(ast.Module(body=list(functions), type_ignores=[]), "common.py", "exec")
    exec(code, common.__dict__)  # noqa: S102  (SGLang's own source, from its installed wheel)
    sys.modules[common.__name__] = common
    return importlib.import_module(name)


def backend(options: argparse.Namespace) -> Any:
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(options.dir)
    hicache = hicache_module(full_import=options.full_import)
    extra: dict[str, Any] = {}
    if options.max_size:
        extra["max_size"] = options.max_size
    if options.min_free:
        extra["min_free_space"] = options.min_free
    if options.meta_cache:
        extra["enable_metadata_cache"] = True
    config = hicache.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=options.model,
        extra_config=extra or None,
    )
    return hicache.HiCacheFile(config)


def chained_keys(count: int) -> list[str]:
    """Page keys as SGLang's get_hash_str makes them: each covers its whole prefix."""
    keys: list[str] = []
    for index in range(count):
        prefix = keys[-1] if keys else ""
        keys.append(hashlib.sha256(f"{prefix}page{index}".encode()).hexdigest())
    return keys


class Run:
    """The pages of one run: their content, their times, and the verdict."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cache = backend(options)
        self.elements = 2 * options.layers * options.page_tokens * KV_HEADS * HEAD_DIM
        self.page_bytes = self.elements * torch.bfloat16.itemsize
        self.keys = chained_keys(options.pages)
        self.errors: list[str] = []
        self.set_seconds = self.get_seconds = 0.0
        self.present = 0

    def check(self, condition: object, what: str) -> None:
        if not condition:
            self.errors.append(what)

    def content(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7000 + index)
        page = torch.randint(0, 256, (self.page_bytes,), dtype=torch.uint8, generator=generator)
        return page.view(torch.bfloat16)

    def set_all(self) -> None:
        self.check(self.cache.batch_exists(self.keys) == 0, "batch_exists before set")
        for index, key in enumerate(self.keys):
            page = self.content(index)
            start = time.perf_counter()
            done = self.cache.set(key, page)
            self.set_seconds += time.perf_counter() - start
            self.check(done, f"set {index}")
        last = len(self.keys) - 1
        self.check(self.cache.set(self.keys[last], self.content(last)), "set of an existing key")

    def get_all(self) -> None:
        count = len(self.keys)
        prefix = self.cache.batch_exists(self.keys)
        found = [index for index, key in enumerate(self.keys) if self.cache.exists(key)]
        self.present = len(found)
        if not self.options.max_size and not self.options.lossy:  # SGLang itself evicts
            self.check(prefix == count, f"batch_exists: prefix of {prefix} of {count}")
            self.check(self.present == count, f"exists: {self.present} of {count}")
        self.cache.batch_exists_v2(self.keys)
        for index in found:
            target = torch.zeros(self.elements, dtype=torch.bfloat16)
            start = time.perf_counter()
            result = self.cache.get(self.keys[index], target)
            self.get_seconds += time.perf_counter() - start
            equal = torch.equal(target.view(torch.uint8), self.content(index).view(torch.uint8))
            self.check(result is not None and equal, f"content {index}")
        absent = self.cache.get("f" * 64, torch.zeros(self.elements, dtype=torch.bfloat16))
        self.check(absent is None, "get of an absent key")

    def finish(self) -> int:
        options = self.options
        result: dict[str, Any] = {
            "lib": "sglang",
            "cls": "HiCacheFile",
            "dir": str(options.dir),
            "page_bytes": self.page_bytes,
            "pages": options.pages,
            "present": self.present,
            "files": sorted(os.listdir(options.dir))[:1],
            "reader": options.reader,
        }
        gigabyte_pages = self.page_bytes / 1e9
        if self.set_seconds:
            result["put_GBps"] = round(options.pages * gigabyte_pages / self.set_seconds, 3)
        if self.get_seconds:
            result["get_GBps"] = round(self.present * gigabyte_pages / self.get_seconds, 3)
        if not options.keep:
            self.check(self.cache.clear(), "clear")
            self.check(self.cache.batch_exists(self.keys) == 0, "batch_exists after clear")
        result["left_in_dir"] = len(os.listdir(options.dir))
        result["ok"] = not self.errors
        result["errors"] = self.errors[:5]
        print(json.dumps(result), flush=True)
        return 1 if self.errors else 0


def main() -> int:
    logging.basicConfig(level=logging.ERROR)
    run = Run(arguments())
    if not run.options.reader:
        run.set_all()
    run.get_all()
    return run.finish()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # SGLang's threads do not end by themselves
