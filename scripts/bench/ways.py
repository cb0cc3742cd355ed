"""Ways to keep the blocks of a prompt in files, each saving and loading the same tensors.

`prefix.py` compares these ways. Each way has one prompt. `save` writes blocks. `load` fills a
tensor that is there, like an engine's memory. `map` gives tensors over files if the way has them.
`drop` deletes the files. A way does the same as its users, no more: no way is slowed down. Not for
clocks.
"""

import ctypes
import hashlib
import json
import os
import shutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import ClassVar

import safetensors.torch
import torch
from torch import Tensor

from kvfs.client import PrefixCache, Spec

THREADS = 4  # of kvfs.client by itself, and of each way that is compared with it


def contents(tensor: Tensor) -> memoryview:
    """Its bytes, without a copy."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B")


class Way(ABC):
    """Blocks of one prompt below a folder of its own. A block is [*spec.shape]."""

    maps: ClassVar[bool] = False

    def __init__(self, folder: Path, spec: Spec, tokens: list[int]) -> None:
        self.folder, self.spec, self.tokens = folder, spec, tokens

    @abstractmethod
    def save(self, blocks: Tensor) -> None:
        """blocks: [n, *spec.shape]."""

    @abstractmethod
    def load(self, out: Tensor) -> None:
        """Fill [n, *spec.shape]."""

    def map(self, count: int) -> list[Tensor]:
        """The first `count` blocks, as files have them."""
        raise NotImplementedError

    def drop(self) -> None:
        shutil.rmtree(self.folder)

    def close(self) -> None:  # noqa: B027 (most have opened nothing)
        """Give back what was opened."""


class Client(Way):
    """kvfs.client."""

    maps = True

    def __init__(self, folder: Path, spec: Spec, tokens: list[int]) -> None:
        super().__init__(folder, spec, tokens)
        self._cache = PrefixCache(folder, spec, threads=THREADS, create=True)

    def save(self, blocks: Tensor) -> None:
        assert self._cache.save(self.tokens, blocks) == len(blocks), self._cache.stats

    def load(self, out: Tensor) -> None:
        assert self._cache.load(self.tokens, out).blocks == len(out), self._cache.stats

    def map(self, count: int) -> list[Tensor]:
        found = list(self._cache.load(self.tokens, mode="mmap", blocks=count).tensors)
        assert len(found) == count, self._cache.stats
        return found

    def drop(self) -> None:
        for above in (self.spec.root, *self.spec.keys(self.tokens)):
            shutil.rmtree(self.folder / above.hex(), ignore_errors=True)

    def close(self) -> None:
        self._cache.close()


class Vua(Way):
    """VUA's design (vast-data/VUA, src/vua/core.py), one group for each block.

    Each group has a directory, named by the SHA-1 of all tokens up to it, and a link to the group
    before. The directory is made under a temporary name, and renamed at the end. A save clones the
    group's tensor out of the cache, puts it into a safetensors file in memory, and writes the file.
    The tokens are written beside it, and both are synced. A load reads whole files, cuts the
    tensors out of them and puts the groups together. Each group has a thread.
    """

    def save(self, blocks: Tensor) -> None:
        names = self._names()
        self.folder.mkdir(exist_ok=True)

        def save(at: int) -> None:
            size = self.spec.block_tokens
            made = self.folder / f"{names[at]}.tmp"
            made.mkdir()
            if at:
                (made / "parent").symlink_to(f"../{names[at - 1]}")
            tokens = torch.tensor(self.tokens[at * size : (at + 1) * size])
            for name, tensor in (("_data", blocks[at].clone()), ("_tokens", tokens)):
                data = safetensors.torch.save({name: tensor})
                with open(made / f"{name}.safetensors", "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            made.rename(self.folder / names[at])

        self._all(save, len(blocks))

    def load(self, out: Tensor) -> None:
        names = self._names()
        found: list[Tensor | None] = [None] * len(out)

        def load(at: int) -> None:
            group = self.folder / names[at]
            tokens = self._tensor(group / "_tokens.safetensors", torch.int64)
            assert len(tokens) == self.spec.block_tokens
            found[at] = self._tensor(group / "_data.safetensors", self.spec.torch_dtype)

        self._all(load, len(out))
        torch.stack([one for one in found if one is not None], out=out)

    def _tensor(self, path: Path, dtype: torch.dtype) -> Tensor:
        with open(path, "rb") as file:
            data = file.read()
        (size,) = struct.unpack_from("<Q", data)
        (about,) = json.loads(data[8 : 8 + size]).values()
        begin, end = about["data_offsets"]
        numbers = bytearray(memoryview(data)[8 + size + begin : 8 + size + end])
        return torch.frombuffer(numbers, dtype=dtype).reshape(about["shape"])

    def _names(self) -> list[str]:
        """Each of all tokens from the beginning on, and of the name before."""
        found: list[str] = []
        words = [f"{token:x}" for token in self.tokens]
        for end in range(self.spec.block_tokens, len(words) + 1, self.spec.block_tokens):
            before = f"hash:{found[-1]}:" if found else ""
            text = before + ",".join(words[:end])
            found.append(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        return found

    @staticmethod
    def _all(work: Callable[[int], None], count: int) -> None:
        threads = [Thread(target=work, args=(at,)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Files(Way):
    """A file for each block, and nothing clever: one after the other."""

    suffix: ClassVar[str]

    def _path(self, at: int) -> str:
        return f"{self.folder}/{at}.{self.suffix}"

    def save(self, blocks: Tensor) -> None:
        self.folder.mkdir(exist_ok=True)
        for at, block in enumerate(blocks):
            self.save_one(block, self._path(at))

    def load(self, out: Tensor) -> None:
        for at, target in enumerate(out):
            target.copy_(self.load_one(self._path(at)))

    @abstractmethod
    def save_one(self, block: Tensor, path: str) -> None: ...

    @abstractmethod
    def load_one(self, path: str) -> Tensor: ...


class Torch(Files):
    """torch.save and torch.load. A block is cloned, or all of the cache would go into each file."""

    suffix = "pt"

    def save_one(self, block: Tensor, path: str) -> None:
        torch.save(block.clone(), path)

    def load_one(self, path: str) -> Tensor:
        found: Tensor = torch.load(path, weights_only=True)
        return found


class Safetensors(Files):
    """save_file and load_file of safetensors."""

    suffix = "safetensors"

    def save_one(self, block: Tensor, path: str) -> None:
        safetensors.torch.save_file({"block": block}, path)

    def load_one(self, path: str) -> Tensor:
        return safetensors.torch.load_file(path)["block"]


class Raw(Way):
    """One write or read for each file, by as many threads as kvfs.client has: a bound."""

    def __init__(self, folder: Path, spec: Spec, tokens: list[int]) -> None:
        super().__init__(folder, spec, tokens)
        self._threads = ThreadPoolExecutor(THREADS)

    def save(self, blocks: Tensor) -> None:
        self.folder.mkdir(exist_ok=True)

        def save(at: int) -> None:
            fd = os.open(f"{self.folder}/{at}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                assert os.pwrite(fd, contents(blocks[at]), 0) == self.spec.block_bytes
            finally:
                os.close(fd)

        list(self._threads.map(save, range(len(blocks))))

    def load(self, out: Tensor) -> None:
        def load(at: int) -> None:
            fd = os.open(f"{self.folder}/{at}", os.O_RDONLY)
            try:
                assert os.preadv(fd, [contents(out[at])], 0) == self.spec.block_bytes
            finally:
                os.close(fd)

        list(self._threads.map(load, range(len(out))))

    def close(self) -> None:
        self._threads.shutdown()


class Memory(Way):
    """No files: one memcpy of all. The other bound."""

    def __init__(self, folder: Path, spec: Spec, tokens: list[int]) -> None:
        super().__init__(folder, spec, tokens)
        self._kept: Tensor | None = None

    def save(self, blocks: Tensor) -> None:
        if self._kept is None:
            self._kept = torch.zeros_like(blocks)  # touched: memory that was had before
        self.copy(self._kept, blocks)

    def load(self, out: Tensor) -> None:
        assert self._kept is not None
        self.copy(out, self._kept)

    def drop(self) -> None:
        """Kept, as an engine's memory is."""

    def close(self) -> None:
        self._kept = None

    def copy(self, to: Tensor, from_: Tensor) -> None:
        # ctypes gives the GIL back, and torch's own threads stay out of it.
        ctypes.memmove(to.data_ptr(), from_.data_ptr(), from_.nbytes)


class Threaded(Memory):
    """The same by as many threads as kvfs.client has, block by block."""

    def __init__(self, folder: Path, spec: Spec, tokens: list[int]) -> None:
        super().__init__(folder, spec, tokens)
        self._threads = ThreadPoolExecutor(THREADS)

    def copy(self, to: Tensor, from_: Tensor) -> None:
        list(self._threads.map(super().copy, to, from_))

    def close(self) -> None:
        super().close()
        self._threads.shutdown()
