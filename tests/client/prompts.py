"""Prompts, and blocks with bytes computed from their keys: other bytes are a defect."""

import torch
from xxhash import xxh3_64_intdigest

from kvfs.client import Spec

SPEC = Spec(
    model="m", revision="r", dtype="bfloat16", axes={"kv": 2, "token": 4, "head": 3, "dim": 8}
)
TOKENS = list(range(100, 100 + 4 * 10 + 3))  # ten whole blocks, and three tokens


def block_of(key: bytes, spec: Spec = SPEC) -> torch.Tensor:
    generator = torch.Generator().manual_seed(xxh3_64_intdigest(key) >> 1)
    return torch.randn(spec.shape, generator=generator).to(spec.torch_dtype)


def blocks_of(tokens: list[int], spec: Spec = SPEC) -> torch.Tensor:
    return torch.stack([block_of(key, spec) for key in spec.keys(tokens)])
