"""Asks the real SGLang 0.5.23 how it names files, and how it reads a configuration.

    ask_sglang.py DIR

Names come from HiCacheFile itself, for models of both kinds and all ways of parallelism. The
configuration is the file DIR/sglang-file.conf. SGLang's own table reads its variables, a parser of
SGLang's declarations its flags, the evictor's function its size. Writes nothing except
HiCacheFile's directory. Prints one JSON line.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401  (SGLang's classes have no types here)

import argparse
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from run_sglang_hicache import chained_keys, hicache_module

MODELS = ("meta-llama/Llama-3.1-8B", "/models/my model_v2", "org/50%_off", "a@b.c")
SIZE = "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


SINGLE = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
}
PARALLEL: tuple[dict[str, int], ...] = (
    {},
    {"tp_rank": 3, "tp_size": 8},
    {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "pp_size": 2},
    {"tp_size": 2, "pp_rank": 0, "pp_size": 4, "attn_cp_rank": 1, "attn_cp_size": 2},
)
DECODE = {"tp_rank": 1, "tp_size": 4, "dcp_rank": 1, "dcp_size": 2}


def names(hicache: Any, directory: Path) -> list[dict[str, Any]]:
    """A page and its pools, for each way of running a model; they are one group."""
    found = []
    (key,) = chained_keys(1)
    ways = [(is_mla, {**SINGLE, **ranks}) for is_mla in (False, True) for ranks in PARALLEL]
    for model in MODELS:
        for is_mla, ranks in (*ways, (True, {**SINGLE, **DECODE})):
            config = hicache.HiCacheStorageConfig(
                is_mla_model=is_mla,
                enable_storage_metrics=False,
                is_page_first_layout=False,
                model_name=model,
                logical_page_size=64,
                extra_config={"file_storage_path": str(directory / "pages")},
                **ranks,
            )
            cache = hicache.HiCacheFile(config)
            for pool in hicache.PoolName:
                name = cache._get_component_key(key, pool) + ".bin"
                shared = is_mla and pool != hicache.PoolName.MAMBA and "dcp_size" not in ranks
                found.append(
                    {
                        "group": model,
                        "path": name,
                        "layout": "sglang-file",
                        "model": model.replace("/", "-"),
                        "block": key,
                        "shard": "" if pool == hicache.PoolName.KV else str(pool),
                        "rank": None if shared else ranks["tp_rank"],
                        "world": None if shared else ranks["tp_size"],
                    }
                )
    return found


def understood(path: Path) -> dict[str, Any]:
    """SGLang's reading of a configuration."""
    text = path.read_text()
    variables: dict[str, str] = {}
    command: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(
            line.removeprefix("# ") if f"export {SIZE}" in line else line, comments=True
        )
        if words[:1] == ["export"]:
            name, value = words[1].split("=", 1)
            variables[name] = value
        elif words:
            command = words
    os.environ.update(variables)
    envs = importlib.import_module("sglang.srt.environ").envs
    evictor = importlib.import_module("sglang.srt.mem_cache.storage.file.lru_file_evictor")
    arguments = importlib.import_module("sglang.srt.arg_groups.arg_utils")
    memory = importlib.import_module("sglang.srt.arg_groups.fields.memory").Memory
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_cli_args_from_dataclass(parser, memory)
    flags, rest = parser.parse_known_args(command[3:])
    return {
        "variables": sorted(variables),
        "path": getattr(envs, FOLDER).get(),
        "bytes": evictor._parse_size_to_bytes(getattr(envs, SIZE).get()),
        "as_vendors_write_it": evictor._parse_size_to_bytes("200GB"),
        "hierarchical": flags.enable_hierarchical_cache,
        "backend": flags.hicache_storage_backend,
        "rest": rest,
    }


def understood_native(path: Path) -> dict[str, Any]:
    """SGLang's reading of a configuration for kvfs's own backend."""
    words = shlex.split(path.read_text().replace("\\\n", " "), comments=True)
    arguments = importlib.import_module("sglang.srt.arg_groups.arg_utils")
    memory = importlib.import_module("sglang.srt.arg_groups.fields.memory").Memory
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_cli_args_from_dataclass(parser, memory)
    flags, rest = parser.parse_known_args(words[3:])
    return {
        "hierarchical": flags.enable_hierarchical_cache,
        "backend": flags.hicache_storage_backend,
        "layout": flags.hicache_mem_layout,
        "extra": json.loads(flags.hicache_storage_backend_extra_config),
        "rest": rest,
    }


def main() -> None:
    directory = Path(sys.argv[1])
    hicache = hicache_module(full_import=False)
    made = names(hicache, directory)
    found = {
        "ok": True,
        "names": made,
        "understood": understood(directory / "sglang-file.conf"),
        "native": understood_native(directory / "sglang-native.conf"),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # SGLang's threads do not end by themselves
