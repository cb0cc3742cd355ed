"""A transformers cache, through files: real classes, small models with seeded weights."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    Cache,
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

from kvfs import prefix
from kvfs.client import PrefixCache, Spec, SpecMismatchError
from kvfs.connectors.transformers import load, save, spec_of

SEED = 7
BLOCK = 16
WHOSE: dict[str, Any] = {"name": "seeded", "revision": str(SEED), "block_tokens": BLOCK}


def config(**changes: object) -> LlamaConfig:
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,  # attention matters
    }
    return LlamaConfig(**(shape | changes))


def model(dtype: torch.dtype = torch.float32, seed: int = SEED) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    found: Any = LlamaForCausalLM(config())
    found = found.to(dtype).eval()
    assert isinstance(found, LlamaForCausalLM)
    return found


def prompt(length: int, seed: int = SEED) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 97, (length,), generator=generator).tolist()
    return found


@torch.inference_mode()
def forward(of: LlamaForCausalLM, cache: Cache, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of these tokens, which follow the cached ones."""
    out = of(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def filled(of: LlamaForCausalLM, tokens: list[int]) -> DynamicCache:
    cache = DynamicCache(config=of.config)
    forward(of, cache, tokens)
    return cache


def layers(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        found.append((layer.keys, layer.values))
    return found


def states(cache: Cache, length: int) -> torch.Tensor:
    return torch.stack([torch.stack(of)[:, :, :, :length] for of in layers(cache)])


def generate(of: LlamaForCausalLM, cache: Cache, tokens: list[int]) -> list[int]:
    untyped: Any = of
    found: list[int] = untyped.generate(
        torch.tensor([tokens]),
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )[0].tolist()
    return found


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return model()


@pytest.fixture
def prefixes(tmp_path: Path, llama: LlamaForCausalLM) -> Iterator[PrefixCache]:
    with PrefixCache(tmp_path / "llama", spec_of(llama, **WHOSE), create=True) as found:
        yield found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_cache_equals_the_saved_cache(tmp_path: Path, dtype: torch.dtype) -> None:
    llama, tokens = model(dtype), prompt(5 * BLOCK + 3)
    cache = filled(llama, tokens)
    with PrefixCache(tmp_path / "llama", spec_of(llama, **WHOSE), create=True) as prefixes:
        assert save(prefixes, cache, tokens) == 5 * BLOCK
        found, done = load(prefixes, llama, tokens)
    assert done == 5 * BLOCK == found.get_seq_length()
    assert type(found) is DynamicCache
    assert [type(layer) for layer in found.layers] == [type(layer) for layer in cache.layers]
    assert torch.equal(states(found, done), states(cache, done))


def test_logits_are_those_of_the_same_forwards_without_a_cache(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(8 * BLOCK + 5)
    save(prefixes, filled(llama, tokens[: 8 * BLOCK]), tokens)
    expected = forward(llama, filled(llama, tokens[: 8 * BLOCK]), tokens[8 * BLOCK :])
    cache, done = load(prefixes, llama, tokens)
    assert done == 8 * BLOCK
    assert torch.equal(forward(llama, cache, tokens[done:]), expected)
    other = forward(llama, filled(llama, prompt(8 * BLOCK, seed=1)), tokens[8 * BLOCK :])
    assert not torch.equal(other, expected), "what is cached makes no difference here"


def test_generation_from_a_loaded_cache_is_the_same(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(4 * BLOCK + 1)
    begun = filled(llama, tokens[:-1])
    save(prefixes, begun, tokens)
    expected = generate(llama, begun, tokens)
    cache, done = load(prefixes, llama, tokens)
    assert done == 4 * BLOCK
    assert generate(llama, cache, tokens) == expected


def test_the_last_token_is_always_left_to_be_computed(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(3 * BLOCK)
    assert save(prefixes, filled(llama, tokens), tokens) == 3 * BLOCK
    for length, expected in [
        (0, 0),
        (1, 0),
        (BLOCK, 0),
        (BLOCK + 1, BLOCK),
        (3 * BLOCK, 2 * BLOCK),
        (3 * BLOCK + 1, 3 * BLOCK),
    ]:
        _, done = load(prefixes, llama, [*tokens, 5][:length])
        assert done == expected


def test_parts_of_blocks_are_not_saved(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    tokens = prompt(2 * BLOCK - 1)
    cache = filled(llama, tokens)
    assert save(prefixes, cache, tokens) == BLOCK
    assert save(prefixes, cache, tokens[: BLOCK - 1]) == 0
    assert save(prefixes, DynamicCache(config=llama.config), tokens) == 0
    assert load(prefixes, llama, prompt(2 * BLOCK, seed=1))[1] == 0


def test_a_cache_may_have_more_tokens_than_are_saved_or_fewer(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(4 * BLOCK)
    cache = filled(llama, tokens)
    assert save(prefixes, cache, tokens[: 2 * BLOCK]) == 2 * BLOCK
    longer = prompt(9 * BLOCK)
    assert longer[: 4 * BLOCK] == tokens
    assert save(prefixes, cache, longer) == 4 * BLOCK
    found, done = load(prefixes, llama, longer)
    assert torch.equal(states(found, done), states(cache, 4 * BLOCK))


def test_saved_blocks_are_not_written_again(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    tokens = prompt(3 * BLOCK)
    cache = filled(llama, tokens)
    save(prefixes, cache, tokens[: 2 * BLOCK])
    save(prefixes, cache, tokens)
    save(prefixes, cache, tokens)
    assert prefixes.stats.blocks_saved == 3


def test_saving_in_several_parts(
    monkeypatch: pytest.MonkeyPatch, prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    monkeypatch.setattr(
        "kvfs.connectors.transformers._SAVED_AT_ONCE", 2 * prefixes.spec.block_bytes
    )
    tokens = prompt(5 * BLOCK + 1)
    cache = filled(llama, tokens)
    assert save(prefixes, cache, tokens) == 5 * BLOCK
    found, done = load(prefixes, llama, tokens)
    assert torch.equal(states(found, done), states(cache, 5 * BLOCK))


def test_a_block_that_is_gone_shortens_the_prefix(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(5 * BLOCK + 1)
    cache = filled(llama, tokens)
    save(prefixes, cache, tokens)
    keys = prefixes.spec.keys(tokens)
    Path(prefixes.path, prefix.path(keys[1], keys[2])).unlink()
    found, done = load(prefixes, llama, tokens)
    assert done == 2 * BLOCK == found.get_seq_length()
    assert torch.equal(states(found, done), states(cache, done))


def test_failed_save_returns_the_tokens_that_are_saved(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    """A file is in the place of a directory, so no file below it can be made."""
    tokens = prompt(3 * BLOCK)
    keys = prefixes.spec.keys(tokens)
    save(prefixes, filled(llama, tokens[:BLOCK]), tokens)
    directory = Path(prefixes.path, keys[0].hex())
    directory.rmdir()
    directory.write_bytes(b"")
    assert save(prefixes, filled(llama, tokens), tokens) == BLOCK
    assert prefixes.stats.save_errors


def test_writing_into_a_loaded_cache_changes_no_file(
    prefixes: PrefixCache, llama: LlamaForCausalLM
) -> None:
    tokens = prompt(2 * BLOCK + 1)
    save(prefixes, filled(llama, tokens), tokens)
    first, done = load(prefixes, llama, tokens)
    before = states(first, done).clone()
    for keys, _ in layers(first):
        keys.zero_()
    again, _ = load(prefixes, llama, tokens)
    assert torch.equal(states(again, done), before)


def test_another_process_loads_it(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    tokens = prompt(4 * BLOCK + 2)
    save(prefixes, filled(llama, tokens[: 4 * BLOCK]), tokens)
    expected = forward(llama, filled(llama, tokens[: 4 * BLOCK]), tokens[4 * BLOCK :])
    program = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_transformers import *
llama, tokens = model(), prompt({len(tokens)})
with PrefixCache({prefixes.path!r}, spec_of(llama, **WHOSE)) as prefixes:
    cache, done = load(prefixes, llama, tokens)
torch.save((done, forward(llama, cache, tokens[done:])), {prefixes.path + ".result"!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    done, logits = torch.load(prefixes.path + ".result")
    assert done == 4 * BLOCK
    assert torch.equal(logits, expected)


def test_a_config_is_as_good_as_a_model(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    assert spec_of(llama.config, dtype="float32", **WHOSE) == prefixes.spec
    tokens = prompt(2 * BLOCK + 1)
    save(prefixes, filled(llama, tokens), tokens)
    found, done = load(prefixes, llama.config, tokens)
    assert (done, layers(found)[0][0].device.type) == (2 * BLOCK, "cpu")


def test_specs_tell_models_apart(llama: LlamaForCausalLM) -> None:
    spec = spec_of(llama, **WHOSE)
    assert dict(spec.axes) == {"kv": 2, "layer": 3, "head": 2, "token": BLOCK, "dim": 8}
    stretched = copy.deepcopy(llama.config)
    stretched.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    quantised = copy.deepcopy(llama.config)
    quantised.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    others = [
        spec_of(stretched, dtype="float32", **WHOSE),
        spec_of(quantised, dtype="float32", **WHOSE),
        spec_of(llama, **(WHOSE | {"revision": "8"})),
        spec_of(llama, **(WHOSE | {"name": "another"})),
        spec_of(llama, **(WHOSE | {"block_tokens": 2 * BLOCK})),
        spec_of(llama, **WHOSE, adapter="lora@1"),
        spec_of(llama, **WHOSE, tokenizer="bytes"),
        spec_of(llama, **WHOSE, dtype=torch.bfloat16),
        spec_of(config(num_key_value_heads=3), dtype="float32", **WHOSE),
    ]
    assert len({one.root for one in [spec, *others]}) == 1 + len(others)


def test_a_directory_of_another_model_is_refused(prefixes: PrefixCache) -> None:
    other = spec_of(model(), **(WHOSE | {"revision": "8"}))
    with pytest.raises(SpecMismatchError) as refusal:
        PrefixCache(prefixes.path, other)
    assert str(other.fingerprint) in str(refusal.value)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (MistralConfig(num_hidden_layers=2, sliding_window=32), "DynamicSlidingWindowLayer"),
        (Qwen3NextConfig(num_hidden_layers=4), "LinearAttentionLayer"),
        (DeepseekV3Config(num_hidden_layers=2), "latent attention"),
        (BartConfig(), "a decoder only"),
        (LlavaConfig(), "for text alone give its LlamaConfig"),
        (
            config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type='dynamic'",
        ),
        (
            Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                    "original_max_position_embeddings": 4096,
                }
            ),
            "rope_type='longrope'",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else "",
)
def test_models_with_other_caches_than_keys_and_values_are_refused(
    of: PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        spec_of(of, dtype="float32", **WHOSE)


def test_layers_of_different_shapes() -> None:
    of = config()
    of.per_layer_config = {1: {"num_key_value_heads": 3}}
    with pytest.raises(ValueError, match="layers of 2 shapes; expected one"):
        spec_of(of, dtype="float32", **WHOSE)


def test_missing_arguments_of_spec_of_are_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="name='': expected the name of the weights"):
        spec_of(llama, revision="1")
    with pytest.raises(ValueError, match="revision='': expected the revision of the weights"):
        spec_of(llama, name="seeded", revision="")
    with pytest.raises(ValueError, match="dtype=None: expected the dtype of keys and values"):
        spec_of(config(), **WHOSE)
    with pytest.raises(TypeError, match="model='llama': expected a model of transformers"):
        spec_of("llama", **WHOSE)  # type: ignore[arg-type]
    llama.peft_config = {"default": object()}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="adapter='': expected the name and version"):
        spec_of(llama, **WHOSE)


def test_the_name_that_weights_were_loaded_by() -> None:
    of = config(dtype=torch.bfloat16)
    of.name_or_path = "somebody/llama"
    spec = spec_of(of, revision="1")
    assert (spec.model, spec.torch_dtype) == ("somebody/llama", torch.bfloat16)


def test_a_cache_that_is_not_of_the_spec(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    tokens = prompt(2 * BLOCK)
    with pytest.raises(TypeError, match=r"cache=\[\]: expected a Cache"):
        save(prefixes, [], tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keys of layer 0: torch.bfloat16 \(1, 2, 32, 8\), exp"):
        save(prefixes, filled(model(torch.bfloat16), tokens), tokens)
    two = DynamicCache(config=llama.config)
    with torch.inference_mode():
        llama(input_ids=torch.tensor([tokens, tokens]), past_key_values=two, use_cache=True)
    with pytest.raises(ValueError, match=r"\(2, 2, 32, 8\), expected torch.float32 \(1, 2, 32"):
        save(prefixes, two, tokens)
    static = StaticCache(config=llama.config, max_cache_len=64)
    forward(llama, static, tokens)
    with pytest.raises(ValueError, match="layer 0 is a StaticLayer; expected a DynamicLayer"):
        save(prefixes, static, tokens)
    fewer = DynamicCache()
    for number in range(2):
        fewer.update(torch.zeros(1, 2, 32, 8), torch.zeros(1, 2, 32, 8), number)
    with pytest.raises(ValueError, match="2 layers, expected 3"):
        save(prefixes, fewer, tokens)
    assert prefixes.stats.blocks_saved == 0


def test_tokens_of_several_dimensions(prefixes: PrefixCache, llama: LlamaForCausalLM) -> None:
    tokens = prompt(2 * BLOCK)
    ids: Any = torch.tensor([tokens])
    cache = filled(llama, tokens)
    for call in (lambda: load(prefixes, llama, ids), lambda: save(prefixes, cache, ids)):
        with pytest.raises(ValueError, match="tokens: of 2 dimensions, expected one prompt"):
            call()
    assert save(prefixes, cache, ids[0]) == 2 * BLOCK
    assert load(prefixes, llama, ids[0])[1] == BLOCK


def test_a_cache_in_fewer_bits(tmp_path: Path) -> None:
    llama, tokens = model(torch.bfloat16), prompt(3 * BLOCK)
    cache = filled(llama, tokens)
    spec = spec_of(llama, **WHOSE, storage="fp8")
    with PrefixCache(tmp_path / "fp8", spec, create=True) as prefixes:
        save(prefixes, cache, tokens)
        found, done = load(prefixes, llama, [*tokens, 1])
    assert done == 3 * BLOCK
    near, exact = states(found, done).float(), states(cache, done).float()
    assert not torch.equal(near, exact)
    assert (near - exact).norm() / exact.norm() < 0.05  # e4m3 has 3 bits of mantissa


def test_loading_for_another_model(tmp_path: Path, prefixes: PrefixCache) -> None:
    with pytest.raises(ValueError, match=r"prefixes: blocks of .*'layer': 3.*, expected .*: 2"):
        load(prefixes, config(num_hidden_layers=2), prompt(20))
    axes = {"kv": 2, "layer": 3, "token": BLOCK, "head": 2, "dim": 8}
    spec = Spec(model="m", revision="1", dtype="float32", axes=axes)
    with (
        PrefixCache(tmp_path / "other", spec, create=True) as other,
        pytest.raises(ValueError, match="see spec_of"),
    ):
        load(other, config(), prompt(20))
