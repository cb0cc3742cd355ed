"""LMCache: its configuration file in YAML, the L2 adapter of its server, and kvfs's own plugin.

Checked against LMCache 0.5.6. A string in JSON is one in YAML. Sizes called GB are of 2**30 bytes.
Not for tuning: what is not said keeps LMCache's default.
"""

import json
import shlex

from kvfs.profiles.profile import GIB, PREFIX, ConnectorProfile, Place

NATIVE_MODULE, NATIVE_CLASS = "kvfs.connectors.lmcache", "KvfsAdapter"

_SHARED = {"eviction": "adaptive"}
_FIXED_TMP = (
    "two processes that write the same chunk use one temporary name: so each has a file of its "
    "own until it closes it"
)


def _gib(size: int) -> str:
    """Rounded down to a thousandth."""
    return f"{size * 1000 // GIB / 1000:.3f}".rstrip("0").rstrip(".")


def _local_disk(place: Place) -> str:
    if place.capacity is None:
        size = "100  # GiB; set it to less than kvfs may use for it"
    else:
        size = f"{_gib(place.share(0))}  # GiB; 90 % of the namespace's quota"
    return f"""\
# LMCache, the file that LMCACHE_CONFIG_FILE names. What an earlier process left is not found again:
# empty the directory before a start.
local_disk: {json.dumps(f"file://{place.path}/")}
max_local_disk_size: {size}
"""


def _fs(place: Place) -> str:
    return f"""\
# LMCache, the file that LMCACHE_CONFIG_FILE names. To share, start all processes with the same
# PYTHONHASHSEED: names have Python's hash unless pre_caching_hash_algorithm says otherwise.
remote_url: {json.dumps(f"fs://localhost:0{place.path}/")}
remote_serde: "naive"
"""


def _l2(place: Place) -> str:
    adapter = json.dumps({"type": "fs", "base_path": place.path})
    return f"""\
# LMCache's server. --l1-size-gb is its own memory, yours to choose. The type "fs_native" makes the
# same files.
lmcache server --l1-size-gb 20 --eviction-policy LRU \\
  --l2-adapter {shlex.quote(adapter)}
"""


def _gds(place: Place) -> str:
    return f"""\
# LMCache, the file that LMCACHE_CONFIG_FILE names. gds_buffer_size is MiB of device memory, yours
# to choose. use_gds is off, as cuFile knows no FUSE file systems: chunks are copied through mmap.
gds_path: {json.dumps(place.path)}
gds_buffer_size: 8192
use_gds: false
"""


def _native(place: Place) -> str:
    return f"""\
# LMCache, the file that LMCACHE_CONFIG_FILE names, with kvfs in its environment. To share, start
# all processes with the same PYTHONHASHSEED: chunks have Python's hash unless
# pre_caching_hash_algorithm says otherwise.
remote_storage_plugins: ["kvfs"]
extra_config:
  remote_storage_plugin.kvfs.module_path: "{NATIVE_MODULE}"
  remote_storage_plugin.kvfs.class_name: "{NATIVE_CLASS}"
  remote_storage_plugin.kvfs.path: {json.dumps(place.path)}
"""


PROFILES = {
    "lmcache-local-disk": ConnectorProfile(
        layout="lmcache-local-disk",
        settings={"eviction": "never"},
        why={
            "eviction": "its index is in the process: a file dropped behind its back is a "
            "KeyError, so it is only moved to NVMe; LMCache unlinks what is too much"
        },
        write=_local_disk,
    ),
    "lmcache-fs": ConnectorProfile(
        layout="lmcache-fs",
        settings={**_SHARED, "publish": "close"},
        why={"publish": _FIXED_TMP},
        write=_fs,
    ),
    "lmcache-l2-fs": ConnectorProfile(
        layout="lmcache-l2-fs",
        settings={**_SHARED, "publish": "close"},
        why={"publish": _FIXED_TMP},
        write=_l2,
    ),
    "lmcache-gds": ConnectorProfile(
        layout="lmcache-gds",
        settings=_SHARED,
        why={},
        write=_gds,
    ),
    "lmcache-native": ConnectorProfile(
        layout=None,
        settings=PREFIX,
        why={"prefix": "names are kvfs's own: a chunk that is dropped leaves no directory behind"},
        write=_native,
    ),
}
