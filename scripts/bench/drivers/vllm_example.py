"""vLLM's ExampleConnector (the former SharedStorageConnector): a safetensors file for each layer.

A prompt has 512 tokens of Llama-3.1-8B in pages of 16: a directory with 32 files of 2 MiB. The
connector copies a layer's pages, and writes its file; it maps the file, and copies it to the pages.
It runs without vLLM's engine, with metadata as its scheduler makes it. All copies are measured.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)

from scripts.bench.drivers.driver import Connector, Content, timed

LAYERS, HEADS, CONTENT, PAGE = 32, 8, 256, 16
LAYER_TOKEN = HEADS * CONTENT * 2  # bytes


class VLLMExample(Connector):
    """A prompt is an object: all files of its layers."""

    def __init__(self, bytes_each: int) -> None:
        logging.disable(logging.WARNING)  # one line for each load
        self._content = Content(bytes_each)
        self._tokens = bytes_each // LAYERS // LAYER_TOKEN
        pages = self._tokens // PAGE
        # Layers side by side in one piece of memory; within a layer, pages, heads, tokens, numbers.
        shape = (LAYERS, pages, HEADS, PAGE, CONTENT)
        self._memory = torch.zeros(shape, dtype=torch.bfloat16)
        self._layers = {
            f"layer.{at}": SimpleNamespace(kv_cache=self._memory[at]) for at in range(LAYERS)
        }
        attention = dict.fromkeys(self._layers)
        self._forward: Any = SimpleNamespace(
            no_compile_layers=self._layers, attn_metadata=attention
        )

    def start(self, folder: Path) -> None:
        told = {"shared_storage_path": str(folder)}
        transfer = SimpleNamespace(get_from_extra_config=told.get)
        cache = SimpleNamespace(block_size=PAGE)
        config: Any = SimpleNamespace(kv_transfer_config=transfer, cache_config=cache)
        nothing: Any = None
        self._connector: Any = ExampleConnector(config, KVConnectorRole.WORKER, nothing)

    def put(self, numbers: range) -> list[float]:
        return [self._put(number) for number in numbers]

    def get(self, numbers: range) -> list[float]:
        return [self._get(number) for number in numbers]

    def _put(self, number: int) -> float:
        self._content.fill(self._memory, number)
        self._bind(number, is_store=True)
        seconds = timed(self._save)
        self._memory.zero_()
        return seconds

    def _get(self, number: int) -> float:
        self._bind(number, is_store=False)
        seconds = timed(self._connector.start_load_kv, self._forward)
        self._content.check(self._memory, number)
        return seconds

    def _save(self) -> None:
        for name, layer in self._layers.items():
            self._connector.save_kv_layer(name, layer.kv_cache, None)

    def _bind(self, number: int, *, is_store: bool) -> None:
        metadata = ExampleConnectorMetadata()
        # One token more than whole pages, because the connector leaves out the last one.
        tokens = [(number * 7919 + at) % 128_000 for at in range(self._tokens + 1)]
        pages = list(range(self._tokens // PAGE))
        metadata.add_request(tokens, pages, PAGE, is_store, [])
        self._connector.bind_connector_metadata(metadata)
