"""Hugging Face transformers: a `DynamicCache`, saved by one process and loaded by another.

    spec = spec_of(model, name="meta-llama/Llama-3.1-8B", revision="0e9e39f")
    with PrefixCache("/mnt/kv/llama", spec, create=True) as prefixes:
        cache, done = load(prefixes, model, tokens)       # done < len(tokens): the rest is computed
        out = model(torch.tensor([tokens[done:]]), past_key_values=cache, use_cache=True)
        save(prefixes, out.past_key_values, tokens)

A block is [2 (keys, values), layer, key/value head, token, dimension of a head], so that each layer
of each block is contiguous, as the cache wants it. Loading copies once, from the mapped blocks into
the layers' tensors; saving copies once, from the layers into blocks, which are written from there.

Contract: one sequence (batch 1) without padding, whose first token has position 0; whole blocks
only; never the whole prompt, since the last token's logits must be computed. Other caches of
transformers (windows, states, quantised numbers) are refused, with the reason. `name` and
`revision` must identify the weights, because the connector cannot inspect them. Not for batches,
for `StaticCache`, or for engines that serve many: see docs/engines.md.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfs.client import PrefixCache, Spec

BLOCK_TOKENS = 64
# The keys of these depend on the length of the prompt that they were computed in.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
_SAVED_AT_ONCE = 256 << 20  # bytes that are copied into blocks before these are written


class _States(NamedTuple):
    """The states of one layer, [1, head, token, dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


def spec_of(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    name: str = "",
    revision: str,
    block_tokens: int = BLOCK_TOKENS,
    dtype: torch.dtype | str | None = None,
    tokenizer: str = "",
    adapter: str = "",
    storage: str = "raw",
) -> Spec:
    """Return the spec of a block of this model's cache.

    - name: of the weights; by default the name that they were loaded by.
    - revision: of the weights, as the commit on the hub. Settings that `from_pretrained` may change
      without a new name (rope_parameters, quantization_config) are added to it.
    - dtype: of keys and values; by default the model's.
    - adapter: required if the model has one.
    - The rest: as `kvfs.client.Spec` has it.

    Raises ValueError if a cache of this model is not keys and values of all tokens, of one shape in
    all layers, or if the model's identity is not clear.
    """
    config = _config(model)
    name = name or config.name_or_path or ""
    if not name:
        raise ValueError("name='': expected the name of the weights, which the config lacks")
    if not revision:
        raise ValueError("revision='': expected the revision of the weights, such as a commit")
    if not adapter and getattr(model, "peft_config", None):
        raise ValueError("adapter='': expected the name and version of the model's adapter")
    given = model.dtype if isinstance(model, PreTrainedModel) else config.dtype
    dtype = dtype or given
    if dtype is None:
        raise ValueError(
            "dtype=None: expected the dtype of keys and values, which the config lacks"
        )
    return Spec(
        model=name,
        revision=f"{revision}+{_variant(config)}",
        dtype=dtype,
        axes=_axes(config, block_tokens),
        tokenizer=tokenizer,
        adapter=adapter,
        storage=storage,
    )


def load(
    prefixes: PrefixCache,
    model: PreTrainedModel | PreTrainedConfig,
    tokens: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> tuple[DynamicCache, int]:
    """Return a cache of the longest cached prefix, and its number of tokens (0: it is empty).

    - tokens: of one prompt, from its beginning. At least the last one is left to be computed.
    - device: the place of the cache; by default the model's, the CPU for a config.

    Raises ValueError or TypeError for arguments that do not fit together. A missing block is a
    miss.
    """
    spec, config = prefixes.spec, _config(model)
    _check_shape(spec, config)
    _check_tokens(tokens)
    if device is None:
        device = model.device if isinstance(model, PreTrainedModel) else "cpu"
    device = torch.device(device)
    cache = DynamicCache(config=config)
    whole = max(0, len(tokens) - 1) // spec.block_tokens
    tokens = tokens[: whole * spec.block_tokens]
    if device.type == "cpu" and spec.storage == "raw":
        blocks = prefixes.load(tokens, mode="mmap").tensors
    else:
        blocks = prefixes.load(tokens, device=device).tensors
    if not blocks:
        return cache, 0
    for number, layer in enumerate(cache.layers):
        assert isinstance(layer, DynamicLayer)  # else _check_shape had refused the config
        keys, values = (
            torch.cat([block[kind, number] for block in blocks], dim=1).unsqueeze(0)
            for kind in range(2)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values  # `layer.update` would copy once more
    return cache, len(blocks) * spec.block_tokens


def save(prefixes: PrefixCache, cache: Cache, tokens: Sequence[int]) -> int:
    """Save the missing whole blocks of `tokens`; return the number of tokens that are cached.

    cache: of these tokens, from the first on; it may have fewer or more. It is not changed. Raises
    ValueError for a cache that differs from the description of `spec_of`.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache={cache!r}: expected a Cache of transformers")
    _check_tokens(tokens)
    spec, size = prefixes.spec, prefixes.spec.block_tokens
    whole = min(len(tokens), cache.get_seq_length()) // size
    layers = list(_layers(cache, spec)) if whole else []
    saved = prefixes.match(tokens[: whole * size]).blocks
    at_once = max(1, _SAVED_AT_ONCE // spec.block_bytes)
    while saved < whole:
        end = min(saved + at_once, whole)
        count = prefixes.save(tokens[: end * size], _blocks(layers, spec, saved, end), start=saved)
        if count < end:
            return count * size
        saved = end
    return saved * size


def _blocks(layers: Sequence[_States], spec: Spec, start: int, end: int) -> torch.Tensor:
    """Return blocks `start` to `end` of a sequence, [end - start, *spec.shape]."""
    size = spec.block_tokens
    shape = (end - start, *spec.shape)
    blocks = torch.empty(shape, dtype=spec.torch_dtype, device=layers[0].keys.device)
    for number, layer in enumerate(layers):
        for kind, states in enumerate(layer):
            part = states[0, :, start * size : end * size].detach()  # [head, token, dim]
            heads, _, dim = part.shape
            blocks[:, kind, number] = part.view(heads, -1, size, dim).transpose(0, 1)
    return blocks


def _config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """Return the model's config. Raises ValueError unless tokens alone determine its cache."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"model={model!r}: expected a model of transformers, or its config")
    who = type(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(
            f"{who}: the cache of a model with an encoder depends on more than these tokens; "
            "expected a model with a decoder only"
        )
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise ValueError(
            f"{who}: token ids do not identify images or sounds; for text alone give its "
            f"{type(text).__name__}"
        )
    return config


def _axes(config: PreTrainedConfig, block_tokens: int) -> dict[str, int]:
    """Return the axes of a block. ValueError: the layers' keys and values differ in shape."""
    who = type(config).__name__
    others = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    others -= {DynamicLayer.__name__}
    if others:
        raise ValueError(
            f"{who}: its cache has layers of {', '.join(sorted(others))}; expected DynamicLayer "
            "only, which keeps the keys and values of all tokens"
        )
    rope = _rope_types(config.to_dict().get("rope_parameters")) & _ROPE_BY_LENGTH
    if rope:
        raise ValueError(
            f"{who}: rope_type={min(rope)!r}: keys depend on the length of the prompt; expected a "
            "type for which they do not"
        )
    shapes = {_heads(layer) for layer in config.per_layer_config}
    if len(shapes) != 1:
        raise ValueError(f"{who}: layers of {len(shapes)} shapes; expected one for all")
    heads, dim = shapes.pop()
    layers = config.num_hidden_layers
    return {"kv": 2, "layer": layers, "head": heads, "token": block_tokens, "dim": dim}


def _heads(layer: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of heads of keys and values of a layer, and their dimension."""
    if getattr(layer, "kv_lora_rank", None):
        raise ValueError(
            f"{type(layer).__name__}: keys and values of latent attention differ in shape; "
            "expected one for both"
        )
    heads = layer.num_attention_heads
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return getattr(layer, "num_key_value_heads", None) or heads, dim


def _rope_types(parameters: object) -> set[str]:
    """Return the types of all layers: parameters are one set for all, or by kinds of layers."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    own = {parameters["rope_type"]} if "rope_type" in parameters else set()
    return own.union(*nested)


def _variant(config: PreTrainedConfig) -> str:
    """Return a digest of settings that change keys and values, and may change at loading."""
    given = config.to_dict()
    what = {name: given.get(name) for name in ("rope_parameters", "quantization_config")}
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _check_tokens(tokens: Sequence[int]) -> None:
    """Refuse `input_ids`: their extra dimension would make a prompt of one token of them."""
    if getattr(tokens, "ndim", 1) != 1:
        raise ValueError(f"tokens: of {getattr(tokens, 'ndim', 0)} dimensions, expected one prompt")


def _check_shape(spec: Spec, config: PreTrainedConfig) -> None:
    wanted = _axes(config, spec.block_tokens)
    if list(spec.axes.items()) != list(wanted.items()):
        raise ValueError(f"prefixes: blocks of {dict(spec.axes)}, expected {wanted}: see spec_of")


def _layers(cache: Cache, spec: Spec) -> Iterator[_States]:
    """Yield the checked states of each layer."""
    if len(cache.layers) != spec.axes["layer"]:
        raise ValueError(f"cache: {len(cache.layers)} layers, expected {spec.axes['layer']}")
    shape = (1, spec.axes["head"], cache.get_seq_length(), spec.axes["dim"])
    wanted = f"{spec.torch_dtype} {shape}"
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise ValueError(
                f"cache: layer {number} is a {type(layer).__name__}; expected a DynamicLayer, "
                "which keeps the keys and values of all tokens"
            )
        states = _States(layer.keys, layer.values)
        for what, tensor in states._asdict().items():
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            if got != wanted:
                raise ValueError(f"cache: {what} of layer {number}: {got}, expected {wanted}")
        yield states
