"""kvfs's own connector for vLLM, the worker's part: blocks out of paged memory, and back.

A block has 256 tokens of Llama-3.1-8B, 32 MiB, in 16 pages. The connector copies the pages of four
blocks to host memory, as after a step of 1,024 tokens, and writes their files; it reads files and
copies to pages. This driver calls it without vLLM's engine.
"""

import time
from pathlib import Path

import torch

from kvfs.client import PrefixCache, Spec
from kvfs.connectors.paged import Load, Mover, PagedMemory, Save
from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed

LAYERS, HEADS, CONTENT, PAGE = 32, 8, 256, 16
STEP = 4  # blocks
TOKEN = LAYERS * HEADS * CONTENT * 2


class VLLMNative(Connector):
    """`Mover` of kvfs.connectors, which KvfsConnector calls in each step."""

    def __init__(self, bytes_each: int) -> None:
        self._content = Content(bytes_each)
        self._tokens = bytes_each // TOKEN
        self._pages = self._tokens // PAGE
        shape = (STEP * self._pages, HEADS, PAGE, CONTENT)
        self._layers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self._memory = PagedMemory(self._layers, STEP * self._pages)
        self._block = torch.zeros(bytes_each // 2, dtype=torch.bfloat16)

    def start(self, folder: Path) -> None:
        axes = self._memory.axes(self._tokens)
        spec = Spec(model="meta-llama/Llama-3.1-8B", revision="main", dtype="bfloat16", axes=axes)
        self._cache = PrefixCache(folder, spec, threads=4, create=True)
        self._mover = Mover(self._cache, self._memory, staging_bytes=2 << 30)

    def stop(self) -> None:
        self._mover.close()
        self._cache.close()

    def put(self, numbers: range) -> list[float]:
        return [self._put(numbers[at : at + STEP], numbers) for at in range(0, len(numbers), STEP)]

    def get(self, numbers: range) -> list[float]:
        return [self._get(numbers[at : at + STEP], numbers) for at in range(0, len(numbers), STEP)]

    def _chain(self, step: range, numbers: range) -> tuple[bytes, list[bytes]]:
        keys = [number.to_bytes(16, "big") for number in step]
        first = step[0] == numbers[0]
        parent = self._cache.spec.root if first else (step[0] - 1).to_bytes(16, "big")
        return parent, keys

    def _put(self, step: range, numbers: range) -> float:
        for at, number in enumerate(step):
            self._content.fill(self._block, number)
            self._memory.write(self._shaped(), 0, self._numbers(at, 1))
        parent, keys = self._chain(step, numbers)

        def save() -> None:
            self._mover.save(Save(parent, keys, self._numbers(0, len(step))))
            self._mover._saver.submit(int).result()  # noqa: SLF001 (after its files)

        return timed(save)

    def _get(self, step: range, numbers: range) -> float:
        parent, keys = self._chain(step, numbers)
        pages = self._numbers(0, len(step))
        for layer in self._layers:
            layer.zero_()
        if self._cache.match_keys(parent, keys).blocks != len(step):
            raise WrongBytesError("blocks are missing")

        def load() -> None:
            self._mover.load(Load("bench", parent, keys, pages, 0))
            while not (ended := self._mover.loaded())[0]:
                time.sleep(0.0005)
            if ended[1]:
                raise WrongBytesError("blocks are missing")

        seconds = timed(load)
        for at, number in enumerate(step):
            self._memory.read(self._numbers(at, 1), self._shaped())
            self._content.check(self._block, number)
        return seconds

    def _shaped(self) -> torch.Tensor:
        return self._block.view(self._cache.spec.shape)

    def _numbers(self, first: int, count: int) -> list[int]:
        """The pages of `count` blocks from block `first` on."""
        return list(range(first * self._pages, (first + count) * self._pages))
