"""SGLang, transformers, the VUA library and llama.cpp's slots.

Checked against SGLang 0.5.23; VUA is vast-data/VUA 3eb853e, llama.cpp of 2026. Not for tuning: what
is not said keeps the engine's default.
"""

import json
import shlex

from kvfs.profiles.profile import PREFIX, WHY_PREFIX, ConnectorProfile, Place

SGLANG_MODULE, SGLANG_CLASS = "kvfs.connectors.sglang", "KvfsHiCache"

_SHARED = {"eviction": "adaptive"}


def _sglang(place: Place) -> str:
    own = (
        "# With one more variable SGLang itself unlinks above a size, in bytes or as 200G, 200Gi\n"
        "# (200GB is refused and turns it off). kvfs, which sees all processes, does it better.\n"
        f"# export SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE={place.share(0)}\n"
        if place.capacity
        else ""
    )
    return f"""\
# SGLang. One namespace for each dtype and memory layout: its file names do not tell them apart.
{own}export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR={shlex.quote(place.path)}
python -m sglang.launch_server --model-path "$MODEL" \\
  --enable-hierarchical-cache --hicache-storage-backend file
"""


def _sglang_native(place: Place) -> str:
    extra = {
        "backend_name": "kvfs",
        "module_path": SGLANG_MODULE,
        "class_name": SGLANG_CLASS,
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "path": place.path,
    }
    return f"""\
# SGLang, with kvfs in its environment. With page_first a page's keys are one piece of memory, and
# so are its values; with layer_first, SGLang's default, those of each layer.
python -m sglang.launch_server --model-path "$MODEL" \\
  --enable-hierarchical-cache --hicache-mem-layout page_first \\
  --hicache-storage-backend dynamic \\
  --hicache-storage-backend-extra-config {shlex.quote(json.dumps(extra))}
"""


def _transformers(place: Place) -> str:
    return f"""\
# transformers, with kvfs in its environment. model: one of transformers; revision: which weights
# these are, such as a commit; tokens: ids of one prompt.
import torch

from kvfs.client import PrefixCache
from kvfs.connectors.transformers import load, save, spec_of

prefixes = PrefixCache({place.path!r}, spec_of(model, revision=revision))
cache, done = load(prefixes, model, tokens)  # done < len(tokens): the rest is computed
out = model(torch.tensor([tokens[done:]]), past_key_values=cache, use_cache=True)
save(prefixes, out.past_key_values, tokens)
"""


def _vua(place: Place) -> str:
    return f"""\
# VUA as a library. One namespace for each model: its directory names do not tell them apart.
from vua.core import VUA, VUAConfig

vua = VUA(VUAConfig, {place.path!r})
"""


def _slots(place: Place) -> str:
    return f"""\
# llama.cpp. Requests choose the names of slots: one namespace for each model keeps them apart.
llama-server --model "$MODEL" --slot-save-path {shlex.quote(f"{place.path}/")}
"""


def _kvfs(place: Place) -> str:
    return f"""\
# kvfs.client, with kvfs[torch] in the environment. model, revision, dtype and axes make the keys:
# blocks of another model are never found. "token" is how many tokens a block has.
from kvfs.client import PrefixCache, Spec

spec = Spec(
    model="meta-llama/Llama-3.1-8B",
    revision="main",
    dtype="bfloat16",
    axes={{"kv": 2, "layer": 32, "token": 64, "head": 8, "dim": 128}},
)
cache = PrefixCache({place.path!r}, spec)
found = cache.load(tokens)  # found.blocks of the prompt's blocks, found.tensors; compute the rest
cache.save(tokens, blocks, start=found.blocks)  # a tensor of shape (n, *spec.shape)
"""


PROFILES = {
    "kvfs": ConnectorProfile(layout="kvfs-prefix", settings=PREFIX, why=WHY_PREFIX, write=_kvfs),
    "sglang-file": ConnectorProfile(layout="sglang-file", settings=_SHARED, why={}, write=_sglang),
    "sglang-native": ConnectorProfile(
        layout=None, settings=PREFIX, why=WHY_PREFIX, write=_sglang_native
    ),
    "transformers-native": ConnectorProfile(
        layout=None, settings=PREFIX, why=WHY_PREFIX, write=_transformers
    ),
    "vua": ConnectorProfile(layout="vua", settings=_SHARED, why={}, write=_vua),
    "llamacpp-slots": ConnectorProfile(
        layout=None,
        settings={**_SHARED, "publish": "close"},
        why={"publish": "it writes under the final name: others would read half a slot"},
        write=_slots,
    ),
}
