"""The file names of real LMCache and SGLang, and their parsers' reading of our configurations.

Nothing is mounted: the names are compared with those of `kvfs.layouts`.
"""

from pathlib import Path
from typing import Any

import pytest

from kvfs import profiles
from kvfs.layouts import recognise
from tests.connectors.conftest import Client

pytestmark = pytest.mark.clients

GiB = 1 << 30
CAPACITY = 200 * GiB
MOUNT, NAMESPACE = "/mnt/kv", "cache of $HOME's"
PATH = f"{MOUNT}/{NAMESPACE}"


def ask(client: Client, driver: str, directory: Path) -> dict[str, Any]:
    for name in profiles.NAMES:
        text = profiles.configuration(name, MOUNT, NAMESPACE, CAPACITY)
        (directory / f"{name}.conf").write_text(text)
    return client(driver, directory)


def check(names: list[dict[str, Any]]) -> None:
    """Each name is recognised, with its parts.

    Names of one block, and no others, have one key.
    """
    keys: dict[str, set[int]] = {}
    for name in names:
        path, group = name.pop("path"), name.pop("group")
        *directory, file = path.removeprefix("/").encode().split(b"/")
        found = recognise(tuple(directory), file)
        assert found is not None, path
        assert {field: getattr(found, field) for field in name} == name, path
        assert found.temporary == path.endswith(".tmp"), path
        keys.setdefault(group, set()).add(found.key)
    assert len(names) > len(keys) > 1
    assert {group: len(found) for group, found in keys.items()} == dict.fromkeys(keys, 1)
    assert len(set.union(*keys.values())) == len(keys)


def test_lmcache(client: Client, tmp_path: Path) -> None:
    answer = ask(client, "ask_lmcache.py", tmp_path)
    check(answer["names"])
    assert answer["understood"] == {
        "lmcache-local-disk": {"path": f"{PATH}/", "bytes": 180 * GiB},
        "lmcache-fs": {"path": f"{PATH}/", "serde": "naive"},
        "lmcache-gds": {"path": PATH, "gds": False, "buffer": 8192},
        "lmcache-native": {"plugin": "kvfs", "path": PATH, "adapter": "ConnectorAdapter"},
        "lmcache-l2-fs": {
            "command": ["lmcache", "server"],
            "adapter": "FSL2AdapterConfig",
            "path": PATH,
        },
    }


def test_files_of_lmcaches_native_adapter_are_recognised(client: Client, tmp_path: Path) -> None:
    """Names of the native adapter are made in C++, so files are written to see them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    arguments = ("--mode", "l2_fs_native", "--chunks", "2", "--layers", "2", "--keep")
    client("run_lmcache.py", cache, *arguments)
    found = [recognise((), file.name.encode()) for file in cache.iterdir()]
    assert [(block.layout, block.model, block.rank, block.world) for block in found if block] == [
        ("lmcache-l2-fs", "meta-llama/Llama-3.1-8B", 0, 1)
    ] * 2


def test_sglang(client: Client, tmp_path: Path) -> None:
    answer = ask(client, "ask_sglang.py", tmp_path)
    check(answer["names"])
    assert answer["understood"] == {
        "variables": [
            "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE",
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
        ],
        "path": PATH,
        "bytes": 180 * GiB,
        "as_vendors_write_it": 0,  # which turns SGLang's eviction off: why we write bytes
        "hierarchical": True,
        "backend": "file",
        "rest": ["--model-path", "$MODEL"],
    }
    assert answer["native"] == {
        "hierarchical": True,
        "backend": "dynamic",
        "layout": "page_first",
        "extra": {
            "backend_name": "kvfs",
            "module_path": "kvfs.connectors.sglang",
            "class_name": "KvfsHiCache",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "path": PATH,
        },
        "rest": ["--model-path", "$MODEL"],
    }
