"""Every connector's profile: the settings of its namespace, and the text for its engine.

Checked against LMCache 0.5.6, vLLM 0.33.0 and SGLang 0.5.23; VUA is vast-data/VUA 3eb853e,
llama.cpp of 2026. LMCache reads YAML, where a string in JSON is valid as well; its sizes called GB
are of 2**30 bytes. Not for tuning: every other setting keeps the engine's default.
"""

import json
import shlex
from typing import Any

from kvfs.profiles.profile import GIB, PREFIX, SHARED, WHY_PREFIX, ConnectorProfile, NamespacePath

LMCACHE_MODULE, LMCACHE_CLASS = "kvfs.connectors.lmcache", "KvfsAdapter"
VLLM_MODULE, VLLM_CLASS = "kvfs.connectors.vllm", "KvfsConnector"
SGLANG_MODULE, SGLANG_CLASS = "kvfs.connectors.sglang", "KvfsHiCache"

_WHOLE = {**SHARED, "publish": "close"}
_WHY_WHOLE = {
    "publish": "two processes that write the same chunk use the same temporary name; with close, "
    "each process writes a file of its own"
}
_DIRECTORY = (
    "the connector takes a directory for a hit, and its worker fails if a file in it is missing; "
    "remove whole directories yourself"
)
_HOST_MEMORY = 10 * GIB


def _gib(size: int) -> str:
    """Return a size in GiB, rounded down to a thousandth."""
    return f"{size * 1000 // GIB / 1000:.3f}".rstrip("0").rstrip(".")


def _lmcache_local_disk(place: NamespacePath) -> str:
    if place.room is None:
        size = "100  # GiB; give less than the room that kvfs has for it"
    else:
        whole = (
            "the mount; give less if others use it"
            if place.capacity is None
            else "the namespace's quota"
        )
        size = f"{_gib(place.share(0))}  # GiB; 90 % of {whole}"
    return f"""\
# LMCache: the file of LMCACHE_CONFIG_FILE. LMCache does not find the files of an earlier process:
# empty the directory before each start.
local_disk: {json.dumps(f"file://{place.path}/")}
max_local_disk_size: {size}
"""


def _lmcache_fs(place: NamespacePath) -> str:
    return f"""\
# LMCache: the file of LMCACHE_CONFIG_FILE. To share chunks, start all processes with the same
# PYTHONHASHSEED: file names contain Python's hash, unless you set pre_caching_hash_algorithm.
remote_url: {json.dumps(f"fs://localhost:0{place.path}/")}
remote_serde: "naive"
"""


def _lmcache_l2(place: NamespacePath) -> str:
    adapter = json.dumps({"type": "fs", "base_path": place.path})
    return f"""\
# LMCache's server. --l1-size-gb is its own memory: choose the size. The type "fs_native" makes the
# same files.
lmcache server --l1-size-gb 20 --eviction-policy LRU \\
  --l2-adapter {shlex.quote(adapter)}
"""


def _lmcache_gds(place: NamespacePath) -> str:
    return f"""\
# LMCache: the file of LMCACHE_CONFIG_FILE. gds_buffer_size is MiB of device memory: choose the
# size. use_gds is off, because cuFile cannot use FUSE: LMCache copies chunks through mmap.
gds_path: {json.dumps(place.path)}
gds_buffer_size: 8192
use_gds: false
"""


def _lmcache_native(place: NamespacePath) -> str:
    return f"""\
# LMCache: the file of LMCACHE_CONFIG_FILE. LMCache's Python environment needs the library of kvfs.
# To share chunks, start all processes with the same PYTHONHASHSEED: file names contain Python's
# hash, unless you set pre_caching_hash_algorithm.
remote_storage_plugins: ["kvfs"]
extra_config:
  remote_storage_plugin.kvfs.module_path: "{LMCACHE_MODULE}"
  remote_storage_plugin.kvfs.class_name: "{LMCACHE_CLASS}"
  remote_storage_plugin.kvfs.path: {json.dumps(place.path)}
"""


def _vllm_serve(
    command: str, connector: str, extra: dict[str, Any], more: dict[str, str] | None = None
) -> str:
    config = {
        "kv_connector": connector,
        **(more or {}),
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return (
        f'{command} serve "$MODEL" \\\n  --kv-transfer-config {shlex.quote(json.dumps(config))}\n'
    )


def _vllm_fs(place: NamespacePath) -> str:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": _HOST_MEMORY,
        "secondary_tiers": [{"type": "fs", "root_dir": place.path}],
    }
    return (
        "# vLLM. cpu_bytes_to_use is host memory in front of the files: choose the size.\n"
        + _vllm_serve("vllm", "OffloadingConnector", extra)
    )


def _vllm_example(place: NamespacePath) -> str:
    return "# vLLM. Use it for a trial only: the connector waits for each file.\n" + _vllm_serve(
        "vllm", "ExampleConnector", {"shared_storage_path": place.path}
    )


def _vllm_disk(place: NamespacePath) -> str:
    extra = {
        "kv_offload_backend": "disk",
        "disk_path": f"{place.path}/cache",
        "disk_capacity_bytes": place.share(100 * GIB),
    }
    note = "# vLLM. disk_capacity_bytes is for one rank: divide it by the number of ranks.\n"
    return note + _vllm_serve("vllm", "SimpleCPUOffloadConnector", extra)


def _vua_vllm(place: NamespacePath) -> str:
    return "# vLLM with VUA's connector. The command vua-vllm registers it.\n" + _vllm_serve(
        "vua-vllm", "VUAStorageConnector_V1", {"shared_storage_path": place.path}
    )


def _vllm_native(place: NamespacePath) -> str:
    return (
        "# vLLM. Its Python environment needs the library of kvfs. If kvfs drops a block between\n"
        "# match and load, vLLM computes it again.\n"
        + _vllm_serve(
            "vllm",
            VLLM_CLASS,
            {"path": place.path},
            {"kv_connector_module_path": VLLM_MODULE, "kv_load_failure_policy": "recompute"},
        )
    )


def _sglang(place: NamespacePath) -> str:
    own = (
        "# With this variable, SGLang unlinks files above a total size (bytes, 200G, 200Gi;\n"
        "# 200GB means no limit). kvfs evicts better, because it sees all processes.\n"
        f"# export SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE={place.share(0)}\n"
        if place.capacity
        else ""
    )
    return f"""\
# SGLang. Make a namespace for each dtype and memory layout: the file names do not contain them.
{own}export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR={shlex.quote(place.path)}
python -m sglang.launch_server --model-path "$MODEL" \\
  --enable-hierarchical-cache --hicache-storage-backend file
"""


def _sglang_native(place: NamespacePath) -> str:
    extra = {
        "backend_name": "kvfs",
        "module_path": SGLANG_MODULE,
        "class_name": SGLANG_CLASS,
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "path": place.path,
    }
    return f"""\
# SGLang. Its Python environment needs the library of kvfs. With page_first, the keys of a page are
# one piece of memory, and its values are another. layer_first, the default, has two for each layer.
python -m sglang.launch_server --model-path "$MODEL" \\
  --enable-hierarchical-cache --hicache-mem-layout page_first \\
  --hicache-storage-backend dynamic \\
  --hicache-storage-backend-extra-config {shlex.quote(json.dumps(extra))}
"""


def _transformers(place: NamespacePath) -> str:
    return f"""\
# transformers. The Python environment needs the library of kvfs. model is a model of transformers,
# revision names its weights (such as a commit), and tokens are the token ids of one prompt.
import torch

from kvfs.client import PrefixCache
from kvfs.connectors.transformers import load, save, spec_of

prefixes = PrefixCache({place.path!r}, spec_of(model, revision=revision))
cache, done = load(prefixes, model, tokens)  # done < len(tokens): compute the rest
out = model(torch.tensor([tokens[done:]]), past_key_values=cache, use_cache=True)
save(prefixes, out.past_key_values, tokens)
"""


def _vua(place: NamespacePath) -> str:
    return f"""\
# VUA as a library. Make a namespace for each model: the directory names do not contain it.
from vua.core import VUA, VUAConfig

vua = VUA(VUAConfig, {place.path!r})
"""


def _slots(place: NamespacePath) -> str:
    return f"""\
# llama.cpp. Requests choose the names of slots: make a namespace for each model.
llama-server --model "$MODEL" --slot-save-path {shlex.quote(f"{place.path}/")}
"""


def _kvfs(place: NamespacePath) -> str:
    return f"""\
# kvfs.client. The Python environment needs kvfs[torch]. model, revision, dtype and axes are part of
# the keys: no program finds blocks of another model. "token" is the number of tokens of a block.
from kvfs.client import PrefixCache, Spec

spec = Spec(
    model="meta-llama/Llama-3.1-8B",
    revision="main",
    dtype="bfloat16",
    axes={{"kv": 2, "layer": 32, "token": 64, "head": 8, "dim": 128}},
)
cache = PrefixCache({place.path!r}, spec)
found = cache.load(tokens)  # found.blocks blocks in found.tensors; compute the rest
cache.save(tokens, blocks, start=found.blocks)  # a tensor of shape (n, *spec.shape)
"""


PROFILES = {
    "lmcache-local-disk": ConnectorProfile(
        settings={"eviction": "never"},
        why={
            "eviction": "LMCache keeps its index in the process, and raises KeyError for a dropped "
            "file; kvfs only moves files to NVMe, and LMCache unlinks them"
        },
        write=_lmcache_local_disk,
    ),
    "lmcache-fs": ConnectorProfile(_lmcache_fs, _WHOLE, _WHY_WHOLE),
    "lmcache-l2-fs": ConnectorProfile(_lmcache_l2, _WHOLE, _WHY_WHOLE),
    "lmcache-gds": ConnectorProfile(_lmcache_gds, SHARED),
    "lmcache-native": ConnectorProfile(
        settings=PREFIX,
        why={"prefix": "kvfs chooses the file names; a dropped chunk leaves no directory behind"},
        write=_lmcache_native,
    ),
    "vllm-fs": ConnectorProfile(_vllm_fs, SHARED),
    "vllm-example": ConnectorProfile(
        settings={"eviction": "never", "mode": "0644"},
        why={
            "eviction": _DIRECTORY,
            "mode": "safetensors makes files of mode 0600, which other users cannot read",
        },
        write=_vllm_example,
    ),
    "vllm-disk": ConnectorProfile(
        settings={"media": "nvme", "eviction": "never"},
        why={
            "media": "one file holds the whole cache, and vLLM writes to it all the time",
            "eviction": "vLLM keeps the index in the process, and needs the file until it ends",
        },
        write=_vllm_disk,
    ),
    "vllm-native": ConnectorProfile(settings=PREFIX, why=WHY_PREFIX, write=_vllm_native),
    "vua-vllm": ConnectorProfile(
        settings={"eviction": "never", "publish": "close"},
        why={
            "eviction": _DIRECTORY,
            "publish": "VUA writes under the final name; with close, no process reads half a file",
        },
        write=_vua_vllm,
    ),
    "kvfs": ConnectorProfile(settings=PREFIX, why=WHY_PREFIX, write=_kvfs),
    "sglang-file": ConnectorProfile(_sglang, SHARED),
    "sglang-native": ConnectorProfile(settings=PREFIX, why=WHY_PREFIX, write=_sglang_native),
    "transformers-native": ConnectorProfile(settings=PREFIX, why=WHY_PREFIX, write=_transformers),
    "vua": ConnectorProfile(_vua, SHARED),
    "llamacpp-slots": ConnectorProfile(
        settings=_WHOLE,
        why={
            "publish": "llama.cpp writes under the final name; with close, no process reads "
            "half a slot"
        },
        write=_slots,
    ),
}
