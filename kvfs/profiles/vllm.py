"""vLLM: `--kv-transfer-config` for its own connectors, for kvfs's and for VUA's.

Checked against vLLM 0.33.0 and vast-data/VUA 3eb853e. Not for tuning: what is not said keeps the
engine's default.
"""

import json
import shlex
from typing import Any

from kvfs.profiles.profile import GIB, PREFIX, WHY_PREFIX, ConnectorProfile, Place

NATIVE_MODULE, NATIVE_CLASS = "kvfs.connectors.vllm", "KvfsConnector"

_SHARED = {"eviction": "adaptive"}
_DIRECTORY = (
    "a directory that exists is a hit, and a file missing in it an exception in the worker: remove "
    "whole directories yourself"
)
_HOST_MEMORY = 10 * GIB


def _serve(
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


def _fs(place: Place) -> str:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": _HOST_MEMORY,
        "secondary_tiers": [{"type": "fs", "root_dir": place.path}],
    }
    return (
        "# vLLM. cpu_bytes_to_use is host memory in front of the files, yours to choose.\n"
        + _serve("vllm", "OffloadingConnector", extra)
    )


def _example(place: Place) -> str:
    return "# vLLM. For trying out: the connector waits for each file.\n" + _serve(
        "vllm", "ExampleConnector", {"shared_storage_path": place.path}
    )


def _disk(place: Place) -> str:
    extra = {
        "kv_offload_backend": "disk",
        "disk_path": f"{place.path}/cache",
        "disk_capacity_bytes": place.share(100 * GIB),
    }
    note = "# vLLM. disk_capacity_bytes is for one rank: divide it by their number.\n"
    return note + _serve("vllm", "SimpleCPUOffloadConnector", extra)


def _vua(place: Place) -> str:
    return "# vLLM with VUA's connector, whose program registers it.\n" + _serve(
        "vua-vllm", "VUAStorageConnector_V1", {"shared_storage_path": place.path}
    )


def _native(place: Place) -> str:
    return (
        "# vLLM, with kvfs in its environment. What was dropped meanwhile is computed.\n"
        + _serve(
            "vllm",
            NATIVE_CLASS,
            {"path": place.path},
            {"kv_connector_module_path": NATIVE_MODULE, "kv_load_failure_policy": "recompute"},
        )
    )


PROFILES = {
    "vllm-fs": ConnectorProfile(layout="vllm-fs", settings=_SHARED, why={}, write=_fs),
    "vllm-example": ConnectorProfile(
        layout="vllm-example",
        settings={"eviction": "never", "mode": "0644"},
        why={
            "eviction": _DIRECTORY,
            "mode": "safetensors makes its files 0600, which another user could not read",
        },
        write=_example,
    ),
    "vllm-disk": ConnectorProfile(
        layout="vllm-disk",
        settings={"media": "nvme", "eviction": "never"},
        why={
            "media": "one file as large as the cache, written in place all the time",
            "eviction": "its index is in the process: it is nobody's to drop",
        },
        write=_disk,
    ),
    "vllm-native": ConnectorProfile(layout=None, settings=PREFIX, why=WHY_PREFIX, write=_native),
    "vua-vllm": ConnectorProfile(
        layout="vua-vllm",
        settings={"eviction": "never", "publish": "close"},
        why={
            "eviction": _DIRECTORY,
            "publish": "it writes under the final name: others would read half a file",
        },
        write=_vua,
    ),
}
