"""The effect of lossy storage on attention, and its cost.

    .venv/bin/python -m scripts.bench.storage [--tokens 1024] [--json FILE]

The models are transformers with seeded weights: real code without training. `llama` has weights
twice as large as it is initialised with, so that attention prefers some tokens. The keys of `qwen2`
have biases, with one channel in sixteen around ten times the others, as keys of trained models
have. No training has taught these models to damp errors from layer to layer.

A prompt is prefilled, and its KV cache is stored and restored in blocks of 64 tokens as bfloat16.
Then the next 64 tokens, which are given, are computed over it in float32. All results are compared
with those over the unchanged cache of bfloat16: `raw` must be 0.

- KV: the relative error of keys and values
- First layer: the error of its attention's output, which only the store causes
- Layers: the mean of all layers, each with the errors of the layers before it
- Logits: the largest difference, beside their standard deviation
- KL: of the next token's distribution, in nats, mean and largest
- Same: how often the most likely token is the same

Throughput is of blocks in memory, one thread, of a block of 8 MiB (Llama 3.1 8B).
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvfs.client.storage import storage
from scripts.bench.mounted import Failed
from scripts.bench.report import Report, number

NAMES = ("raw", "fp8", "int4:32", "int4:64", "int4:128")
BLOCK = 64  # tokens
NEXT = 64  # tokens that are computed over a cache
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "initializer_range": 0.04,
}
EIGHT_B = {"kv": 2, "layer": 32, "token": BLOCK, "head": 8, "dim": 128}
OUTLIERS = 16  # one channel of so many


class Pass(NamedTuple):
    """logits [tokens, vocabulary]; attention: of each layer [tokens, hidden]."""

    logits: Tensor
    attention: list[Tensor]


def llama(seed: int) -> Any:  # noqa: ANN401 (of transformers, whose models have no types)
    """Plain grouped-query attention."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def qwen2(seed: int) -> Any:  # noqa: ANN401 (as above)
    """The same with channels of keys that are far off the others."""
    torch.manual_seed(seed)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias[::OUTLIERS] = torch.empty_like(bias[::OUTLIERS]).uniform_(-10, 10)
    return model


MODELS: dict[str, Callable[[int], Any]] = {"llama": llama, "qwen2": qwen2}


@torch.inference_mode()
def prefilled(model: Any, tokens: Tensor) -> Tensor:  # noqa: ANN401 (as above)
    """The prompt's cache, [kv, layer, token, head, dim] of bfloat16."""
    cache: Any = DynamicCache()
    model(tokens[None], past_key_values=cache, logits_to_keep=1)
    pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(pairs, 1).transpose(2, 3).to(torch.bfloat16).contiguous()


@torch.inference_mode()
def continued(model: Any, kv: Tensor, tokens: Tensor) -> Pass:  # noqa: ANN401 (as above)
    """Run the model on `tokens` over a cache."""
    cache = DynamicCache()
    for at, (keys, values) in enumerate(_layers(kv)):
        cache.update(keys, values, at)
    seen: list[Tensor] = []

    def note(_module: object, _given: object, found: tuple[Tensor, ...]) -> None:
        seen.append(found[0][0])

    hooks = [layer.self_attn.register_forward_hook(note) for layer in model.model.layers]
    try:
        logits = model(tokens[None], past_key_values=cache).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Pass(logits, seen)


def _layers(kv: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer as transformers has them, [1, head, token, dim]."""
    turned = kv.float().transpose(2, 3)
    return [(turned[0, at, None], turned[1, at, None]) for at in range(kv.shape[1])]


def restored(kv: Tensor, name: str) -> Tensor:
    """Stored and read again, block by block."""
    blocks = torch.split(kv, BLOCK, 2)
    shape = dict(zip(EIGHT_B, blocks[0].shape, strict=True))
    made = storage(name, shape, kv.dtype)
    found = [torch.empty_like(block) for block in blocks]
    for block, out in zip(blocks, found, strict=True):
        made.decode(made.encode(block), out)
    return torch.cat(found, 2)


def relative(found: Tensor, right: Tensor) -> float:
    """The norm of the difference, of the right one's."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def compared(found: Pass, right: Pass) -> dict[str, float]:
    """Return the figures of the module's docstring, except KV."""
    p, q = right.logits.double().log_softmax(-1), found.logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    layers = [relative(a, b) for a, b in zip(found.attention, right.attention, strict=True)]
    return {
        "first": layers[0],
        "layers": sum(layers) / len(layers),
        "logits": float((found.logits - right.logits).abs().max()),
        "deviation": float(right.logits.std()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "same": float((found.logits.argmax(-1) == right.logits.argmax(-1)).double().mean()),
    }


def errors(model: str, tokens: int, seed: int) -> list[dict[str, Any]]:
    """One row for each way to store."""
    made = MODELS[model](seed)
    every = torch.randint(SHAPE["vocab_size"], (tokens + NEXT,))
    kv = prefilled(made, every[:tokens])
    right = continued(made, kv, every[tokens:])
    rows = []
    for name in NAMES:
        again = restored(kv, name)
        figures = compared(continued(made, again, every[tokens:]), right)
        rows.append({"model": model, "storage": name, "kv": relative(again, kv), **figures})
    if any(rows[0][name] for name in ("kv", "layers", "logits", "kl_max")):
        raise Failed(f"{model}: raw differs: {rows[0]}")
    return rows


def best(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def costs(name: str, rounds: int) -> dict[str, Any]:
    """Size and throughput of a block of EIGHT_B."""
    block = torch.randn(*EIGHT_B.values()).to(torch.bfloat16)
    made = storage(name, EIGHT_B, block.dtype)
    stored, out = made.encode(block), torch.empty_like(block)
    return {
        "storage": name,
        "stored_bytes": made.stored_bytes,
        "bits": 8 * made.stored_bytes / block.numel(),
        "encode": block.nbytes / best(partial(made.encode, block, stored), rounds),
        "decode": block.nbytes / best(partial(made.decode, stored, out), rounds),
    }


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--tokens", type=click.IntRange(BLOCK), default=1024, help="Of the prompt.")
@click.option("--rounds", type=click.IntRange(1), default=20, help="Of throughput; best counts.")
@click.option("--quick", is_flag=True, help="Small and short: does it run?")
@click.option("--seed", default=7, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="All that was measured.")
def main(tokens: int, rounds: int, seed: int, output: Path | None, *, quick: bool) -> None:
    """Measure the errors and the costs, and print them."""
    tokens, rounds = (BLOCK, 1) if quick else (tokens - tokens % BLOCK, rounds)
    report = Report("storage", seed=seed, tokens=tokens, rounds=rounds)
    found = [row for model in MODELS for row in errors(model, tokens, seed)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent = [costs(name, rounds) for name in NAMES]
    torch.set_num_threads(threads)
    report.document["errors"], report.document["costs"] = found, spent
    names = ["kv", "first", "layers", "logits", "deviation", "kl_mean", "kl_max", "same"]
    report.table(
        "Errors",
        [
            "model",
            "storage",
            "KV",
            "first layer",
            "layers",
            "logits",
            "of std",
            "KL mean",
            "KL max",
            "same",
        ],
        [[row["model"], row["storage"], *(number(row[name]) for name in names)] for row in found],
    )
    report.table(
        "Costs",
        ["storage", "bytes a block", "bits a number", "encode, GB/s", "decode, GB/s"],
        [
            [
                row["storage"],
                f"{row['stored_bytes']:,}",
                number(row["bits"]),
                *(number(row[name] / 1e9) for name in ("encode", "decode")),
            ]
            for row in spent
        ],
    )
    report.write(output)


if __name__ == "__main__":
    main()
