"""Asks the real LMCache 0.5.6 how it names files, and how it reads configurations.

    ask_lmcache.py DIR

Names come from the functions that make them, with parts that are hard to parse. Names of a "group"
belong to one block. Configurations are the files DIR/CONNECTOR.conf. LMCache's own parser reads
them: its YAML, or the command line of its server. Writes nothing. Prints one JSON line.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401  (LMCache's classes have no types here)

import argparse
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # read while LMCache is being imported
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from lmcache.v1.storage_backend.connector import parse_remote_url
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
from lmcache.v1.storage_backend.gds_backend import GdsBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

MODELS = ("meta-llama/Llama-3.1-8B", "/models/my model-v2", "org/50%_off", "a.b_c-d")
RANKS = ((0, 1), (3, 8), (7, 8))
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
TAGS: tuple[dict[str, str], ...] = ({}, {"lmcache.tag.user": "a b%c", "lmcache.tag.n": "1"})


def engine_names(model: str, rank: int, world: int) -> list[dict[str, Any]]:
    """The file names of one chunk, whole and by layer, in the three layouts of engine keys."""
    names = []
    connector: Any = SimpleNamespace(base_paths=[Path("b")], relative_tmp_dir=None)
    connector._get_base_path = lambda _: Path("b")
    connector._get_file_name = lambda key: FSConnector._get_file_name(connector, key)
    chunks = (0x1234567890ABCDEF0000, -0x3F, int("f" * 64, 16))
    for chunk, dtype, tags in zip(chunks, DTYPES, TAGS * 2, strict=False):
        whole = CacheEngineKey(model, world, rank, chunk, dtype, tags)
        layer = LayerCacheEngineKey(model, world, rank, chunk, dtype, tags, layer_id=17)
        for key, shard in ((whole, ""), (layer, "17")):
            final, unfinished = FSConnector._get_file_and_tmp_path(connector, key)
            disk = LocalDiskBackend._key_to_path(SimpleNamespace(path=""), key)  # type: ignore[arg-type]
            backend: Any = SimpleNamespace(gds_path="", data_suffix=".kvcache.safetensors")
            gds = GdsBackend._key_to_path(backend, key)[0]
            says = {"rank": rank, "world": world, "shard": shard, "block": f"{chunk:x}"}
            dashed = model.replace("/", "-")
            for path, layout, called in (
                (disk, "lmcache-local-disk", dashed),
                (final.name, "lmcache-fs", model),
                (unfinished.name, "lmcache-fs", model),
                (gds, "lmcache-gds", model),
                (gds + ".metadata", "lmcache-gds", model),
            ):
                group = f"{layout} {model} {world} {chunk} {dtype} {tags}"
                said = {"path": path, "layout": layout, "model": called, **says}
                names.append({"group": group, **said})
    return names


def object_names(model: str, rank: int, world: int) -> list[dict[str, Any]]:
    """The file names of the L2 adapters, with and without salt and object group."""
    names = []
    for number, salt in ((0, ""), (26, ""), (0, "tenant %7")):
        key = ObjectKey(
            chunk_hash=bytes(range(32)),
            model_name=model,
            kv_rank=ObjectKey.ComputeKVRank(world, rank, world, rank),
            object_group_id=number,
            cache_salt=salt,
        )
        says = {"rank": rank, "world": world, "shard": f"{number:x}", "block": key.chunk_hash.hex()}
        said = {"path": _object_key_to_filename(key), "layout": "lmcache-l2-fs", "model": model}
        names.append({"group": f"l2 {model} {world} {salt}", **said, **says})
    return names


def yaml_config(path: Path) -> Any:
    config = LMCacheEngineConfig.from_file(str(path))
    config.validate()
    return config


def understood(directory: Path) -> dict[str, dict[str, Any]]:
    """LMCache's reading of each configuration, by connector."""
    disk = yaml_config(directory / "lmcache-local-disk.conf")
    shared = yaml_config(directory / "lmcache-fs.conf")
    gds = yaml_config(directory / "lmcache-gds.conf")
    native = yaml_config(directory / "lmcache-native.conf")
    (plugin,) = native.remote_storage_plugins
    option = f"remote_storage_plugin.{plugin}."
    text = (directory / "lmcache-l2-fs.conf").read_text()
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    server = parse_args_to_config(parser.parse_args(words[2:]))
    (adapter,) = server.l2_adapter_config.adapters
    return {
        "lmcache-local-disk": {"path": disk.local_disk, "bytes": disk.max_local_disk_size * 2**30},
        "lmcache-fs": {
            "path": parse_remote_url(shared.remote_url).path,
            "serde": shared.remote_serde,
        },
        "lmcache-gds": {"path": gds.gds_path, "gds": gds.use_gds, "buffer": gds.gds_buffer_size},
        "lmcache-native": {
            "plugin": plugin,
            "path": native.extra_config[option + "path"],
            "adapter": getattr(
                importlib.import_module(native.extra_config[option + "module_path"]),
                native.extra_config[option + "class_name"],
            )
            .__mro__[1]
            .__name__,
        },
        "lmcache-l2-fs": {
            "command": words[:2],
            "adapter": type(adapter).__name__,
            "path": adapter.base_path,
        },
    }


def main() -> None:
    names = [
        name
        for model in MODELS
        for rank, world in RANKS
        for name in (*engine_names(model, rank, world), *object_names(model, rank, world))
    ]
    found = {"ok": True, "names": names, "understood": understood(Path(sys.argv[1]))}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # LMCache's threads do not end by themselves
