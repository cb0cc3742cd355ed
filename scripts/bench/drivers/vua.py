"""VUA's way of writing, without VUA: its library is on no package index.

As in src/vua/core.py of vast-data/VUA 3eb853e: a directory for each group of tokens, with two
safetensors files, written through Python's buffered files with fsync, and a link to the directory
before it. It is made as SHA1.tmp and renamed. VUA has a thread for each group; here 8 groups, as a
prompt of 1,600 tokens has. The copies that VUA makes to build a group are not measured.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load, save

from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed

GROUPS = 8
TOKENS = 200  # of a group


class VUA(Connector):
    """Groups of 8 at a time, each in a thread."""

    def __init__(self, bytes_each: int) -> None:
        self._content = Content(bytes_each)
        self._data = [torch.zeros(bytes_each // 2, dtype=torch.bfloat16) for _ in range(GROUPS)]
        self._threads = ThreadPoolExecutor(GROUPS)

    def start(self, folder: Path) -> None:
        self._folder = folder

    def put(self, numbers: range) -> list[float]:
        seconds = []
        for prompt in _prompts(numbers):
            parts = []
            for at, number in enumerate(prompt):
                self._content.fill(self._data[at], number)
                tokens = save({"tokens": torch.full((TOKENS,), number)})
                parts.append((number, number > prompt[0], save({"data": self._data[at]}), tokens))
            seconds.append(timed(lambda parts=parts: list(self._threads.map(self._save, parts))))
        return seconds

    def get(self, numbers: range) -> list[float]:
        seconds = []
        for prompt in _prompts(numbers):
            found: list[tuple[bytes, bytes]] = []
            seconds.append(timed(lambda prompt=prompt, found=found: self._load(prompt, found)))
            for number, (data, tokens) in zip(prompt, found, strict=True):
                if not (load(tokens)["tokens"] == number).all():
                    raise WrongBytesError(f"group {number} has other tokens")
                self._content.check(load(data)["data"], number)
        return seconds

    def _save(self, part: tuple[int, bool, bytes, bytes]) -> None:
        number, has_parent, data, tokens = part
        group = self._folder / _name(number)
        if group.exists():
            return
        unfinished = group.with_suffix(".tmp")
        unfinished.mkdir()
        if has_parent:
            (unfinished / "parent").symlink_to(Path("..", _name(number - 1)))
        for name, content in (("_data", data), ("_tokens", tokens)):
            with (unfinished / f"{name}.safetensors").open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        unfinished.rename(group)

    def _load(self, prompt: range, found: list[tuple[bytes, bytes]]) -> None:
        found += self._threads.map(self._read, prompt)

    def _read(self, number: int) -> tuple[bytes, bytes]:
        group = self._folder / _name(number)
        tokens = (group / "_tokens.safetensors").read_bytes()
        return (group / "_data.safetensors").read_bytes(), tokens


def _prompts(numbers: range) -> list[range]:
    return [numbers[at : at + GROUPS] for at in range(0, len(numbers), GROUPS)]


def _name(number: int) -> str:
    return hashlib.sha1(b"group %d" % number).hexdigest()  # noqa: S324 (VUA's)
