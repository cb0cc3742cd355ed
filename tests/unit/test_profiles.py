"""Settings and configurations by connector; tests/connectors holds them against real parsers."""

import ast
import json
import shlex
from typing import Any

import pytest

from kvfs import profiles
from kvfs.errors import ConfigError
from kvfs.layouts import LIVES
from kvfs.profiles import ENGINES, NAMES, PROFILES, configuration, settings

GiB = 1 << 30
# Settings of kvfs ns create, and those that a connector may set.
ALLOWED = {
    "media": ("nvme",),  # every tier of the mount, unless a connector's files fit one only
    "eviction": ("adaptive", "never"),
    "publish": ("immediate", "close"),
    "mode": ("0644",),
    "prefix": ("on",),
}


def paste(name: str, capacity: int | None = 100 * GiB, namespace: str = "kv cache") -> str:
    return configuration(name, "/mnt/kv", namespace, capacity)


def transfer_config(name: str) -> dict[str, Any]:
    words = shlex.split(paste(name), comments=True)
    assert words[1:3] == ["serve", "$MODEL"]
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


def test_the_connectors_of_the_field() -> None:
    assert set(NAMES) >= {
        *("lmcache-local-disk", "lmcache-fs", "lmcache-l2-fs", "lmcache-gds"),
        *("vllm-fs", "vllm-example", "sglang-file", "vua", "llamacpp-slots"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_known_and_reasons_belong_to_them(name: str) -> None:
    found = settings(name)
    assert {key: value for key, value in found.items() if value not in ALLOWED[key]} == {}
    assert "eviction" in found
    assert set(PROFILES[name].why) <= set(found)
    for setting, why in PROFILES[name].why.items():
        assert f"# {setting}={found[setting]}: {why}\n" in paste(name)


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_undroppable_layouts_never_evict(name: str) -> None:
    droppable = name not in LIVES or LIVES[name].droppable
    assert (settings(name)["eviction"] != "never") == droppable


def test_settings_are_the_callers_own() -> None:
    settings("vllm-fs")["eviction"] = "fifo"
    assert settings("vllm-fs")["eviction"] == "adaptive"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capacity", [None, 100 * GiB])
def test_comments_are_comments_and_the_rest_has_the_path(name: str, capacity: int | None) -> None:
    text = paste(name, capacity, namespace="cache")
    assert text.endswith("\n")
    said = [line for line in text.splitlines() if not line.startswith("#")]
    assert "/mnt/kv/cache" in "\n".join(said)


@pytest.mark.parametrize(
    ("name", "connector", "extra"),
    [
        (
            "vllm-fs",
            "OffloadingConnector",
            {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 10 * GiB,
                "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/kv/kv cache"}],
            },
        ),
        ("vllm-example", "ExampleConnector", {"shared_storage_path": "/mnt/kv/kv cache"}),
        (
            "vllm-disk",
            "SimpleCPUOffloadConnector",
            {
                "kv_offload_backend": "disk",
                "disk_path": "/mnt/kv/kv cache/cache",
                "disk_capacity_bytes": 90 * GiB,
            },
        ),
        ("vua-vllm", "VUAStorageConnector_V1", {"shared_storage_path": "/mnt/kv/kv cache"}),
        ("vllm-native", "KvfsConnector", {"path": "/mnt/kv/kv cache"}),
    ],
)
def test_vllm_is_told_in_its_words(name: str, connector: str, extra: dict[str, Any]) -> None:
    """The names are those of vLLM's 0.33.0 source and of VUA's README, compared by hand.

    vLLM cannot be imported in the tests. Its files are config/kv_transfer.py,
    kv_offload/tiering/spec.py, tiering/fs/manager.py and simple_cpu_offload_connector.py. The test
    parses the JSON as a shell and vLLM would.
    """
    config = transfer_config(name)
    if name == "vllm-native":
        assert config.pop("kv_connector_module_path") == "kvfs.connectors.vllm"
        assert config.pop("kv_load_failure_policy") == "recompute"
    assert config == {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def test_a_shell_hands_llamacpp_its_directory() -> None:
    words = shlex.split(paste("llamacpp-slots"), comments=True)
    assert words[words.index("--slot-save-path") + 1] == "/mnt/kv/kv cache/"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_two_ways_or_says_why_not(name: str) -> None:
    engine = profiles.engine(name)
    ways = [way for way in (engine.files, engine.native) if way]
    assert ways
    assert bool(engine.lacks) == (len(ways) == 1)
    assert bool(engine.gives) == (len(ways) == 2)
    assert {*ways, *engine.others} <= set(NAMES)
    assert all(map(all, engine.gives)), "a cell is empty"


def test_every_connector_is_a_way_of_one_engine() -> None:
    ways = [way for one in ENGINES.values() for way in (one.files, one.native, *one.others) if way]
    engines = set(NAMES) - {"kvfs"}  # that is for the author of a profile
    assert sorted(ways) == sorted([*engines, "vua-vllm"])  # which is one of vLLM's and of VUA's


def test_an_unknown_engine_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'vlm': expected one of vllm, lmcache"):
        profiles.engine("vlm")


def test_settings_that_do_not_fit_are_found() -> None:
    fits = {"eviction": "adaptive", "publish": "close"}
    assert profiles.misfits("lmcache-fs", fits) == {}  # a daemon of before knows no prefix
    assert profiles.misfits("lmcache-fs", fits | {"prefix": "on"}) == {"prefix": "off"}
    assert profiles.misfits("sglang-native", fits) == {"prefix": "on"}
    assert profiles.misfits("sglang-native", {"eviction": "never", "prefix": "on"}) == {
        "eviction": "adaptive"
    }


def test_transformers_is_python() -> None:
    calls = [ast.unparse(one) for one in ast.parse(paste("transformers-native")).body]
    assert "prefixes = PrefixCache('/mnt/kv/kv cache', spec_of(model, revision=revision))" in calls


def test_vua_is_python() -> None:
    call = ast.parse(paste("vua")).body[-1]
    assert isinstance(call, ast.Assign)
    assert ast.unparse(call) == "vua = VUA(VUAConfig, '/mnt/kv/kv cache')"


@pytest.mark.parametrize(
    ("capacity", "size"), [(100 * GiB, "90"), (64 << 20, "0.056"), (1 << 54, "15099494.4")]
)
def test_lmcache_keeps_below_the_quota(capacity: int, size: str) -> None:
    """Its sizes called GB are of 2**30 bytes (`max_local_disk_size * 1024**3`)."""
    text = paste("lmcache-local-disk", capacity)
    assert f"\nmax_local_disk_size: {size}  #" in text
    assert float(size) * GiB <= capacity * 0.9


@pytest.mark.parametrize(
    ("name", "mountpoint", "namespace", "capacity", "said"),
    [
        ("lmcache-local", "/mnt/kv", "a", None, "did you mean lmcache-local-disk?"),
        ("zzz", "/mnt/kv", "a", None, "expected one of kvfs, llamacpp-slots, "),
        ("vllm-fs", "mnt/kv", "a", None, "absolute path"),
        ("vllm-fs", "/mnt/kv", "a/b", None, "name of one directory"),
        ("vllm-fs", "/mnt/kv", "..", None, "name of one directory"),
        ("vllm-fs", "/mnt/kv", "", None, "name of one directory"),
        ("lmcache-fs", "/mnt/kv", "a,b", None, "choose another name"),
        ("lmcache-fs", "/mnt/kv", "a#b", None, "choose another name"),
        ("lmcache-fs", "/mnt/kv", "a\nb", None, "choose another name"),
        ("lmcache-fs", "/mnt/kv", "a ", None, "choose another name"),
        (
            "sglang-file",
            "/mnt/kv",
            "a",
            1 << 20,
            "quota_hard=1M of namespace 'a': expected at least 64M",
        ),
    ],
)
def test_configuration_that_an_engine_cannot_read_is_refused(
    name: str, mountpoint: str, namespace: str, capacity: int | None, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        profiles.configuration(name, mountpoint, namespace, capacity)
    assert said in str(refused.value)
