"""Writes the KV cache of a small Llama as an engine would have it: attention's real values.

    python make_kv.py FILE [--dtype bf16] [--layers 4] [--tokens 4096] [--seed 7]

transformers' LlamaModel (grouped queries, rotary positions, RMS norm) with seeded weights runs over
token ids of Zipf's distribution, as words of a text have. FILE has for each layer the keys and then
the values, each tokens x heads x 64 numbers. This is the order in which vLLM keeps them. As vLLM
does without calibrated scales, fp8 is made of bf16 as e4m3 with scale 1. Weights are not trained:
outlier channels, which compress better, are missing. The last line printed is JSON.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaModel

VOCABULARY = 8192
KEPT = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=KEPT, default="bf16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=7)
    wanted = parser.parse_args()
    torch.manual_seed(wanted.seed)
    torch.set_num_threads(1)
    kept = KEPT[wanted.dtype]
    computed = torch.bfloat16 if wanted.dtype == "fp8" else kept
    model = LlamaModel(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=wanted.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=wanted.tokens,
        )
    )
    frequencies = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    tokens = torch.multinomial(frequencies, wanted.tokens, replacement=True)[None]
    with torch.inference_mode():
        cache = model.to(computed).eval()(tokens, use_cache=True).past_key_values
    with wanted.file.open("wb") as file:
        for layer in cache.layers:
            for numbers in (layer.keys, layer.values):
                by_token = numbers[0].transpose(0, 1).contiguous().to(kept)
                file.write(by_token.view(torch.uint8).numpy().tobytes())
        written = file.tell()
    print(json.dumps({"ok": True, "bytes": written, "seed": wanted.seed}))


if __name__ == "__main__":
    main()
