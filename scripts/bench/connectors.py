"""The connectors that engines.py measures, and a process for the driver of each.

Not for measuring: the drivers do (drivers/). The process of a driver imports its engine once.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.mounted import Failed
from scripts.bench.report import note

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
KiB, MiB = 1 << 10, 1 << 20
CHUNK = 32 * MiB  # of LMCache: 256 tokens of Llama-3.1-8B
MOST_FILES = 512  # of a turn
SAID = 4000  # of what a driver printed before it failed
QUIET = {  # read while an engine is imported
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


@dataclass(frozen=True)
class Entry:
    """A driver: where it is, and the objects of a turn; `files` limits them.

    `profile`: for `kvfs ns create --for`, as docs/engines.md tells users.
    """

    name: str
    module: str
    driver: str
    bytes_each: int
    profile: str = ""
    arguments: tuple[str, ...] = ()
    files: int = MOST_FILES
    engine: bool = True  # needs .venv-clients
    reads: bool = False  # opens, fstats, reads and closes, instead of puts and gets

    def count(self, total: int) -> int:
        return max(2, min(self.files, total // self.bytes_each))


def entries(page_size: int) -> list[Entry]:
    """All that the benchmark runs, in the order of the report."""
    page = page_size * 128 * KiB
    return [
        Entry("loop", "loop", "Loop", 8 * MiB, files=32, engine=False, reads=True),
        Entry("sglang file", "sglang_file", "SGLangFile", page, "sglang-file"),
        Entry("sglang native", "sglang_native", "SGLangNative", 8 * MiB, "sglang-native"),
        Entry("lmcache local_disk", "lmcache", "LocalDisk", CHUNK, "lmcache-local-disk"),
        Entry("lmcache fs", "lmcache", "Remote", CHUNK, "lmcache-fs"),
        Entry("lmcache l2 fs", "lmcache", "L2", CHUNK, "lmcache-l2-fs", ("l2_fs",)),
        Entry("lmcache l2 fs_native", "lmcache", "L2", CHUNK, "lmcache-l2-fs", ("l2_fs_native",)),
        Entry("lmcache native", "lmcache", "Native", CHUNK, "lmcache-native"),
        Entry("vllm fs", "vllm_fs", "VLLMFs", 8 * MiB, "vllm-fs"),
        Entry("vllm fs 1M", "vllm_fs", "VLLMFs", MiB, "vllm-fs"),
        Entry("vllm example", "vllm_example", "VLLMExample", 64 * MiB, "vllm-example"),
        Entry("vllm native", "vllm_native", "VLLMNative", CHUNK, "vllm-native"),
        Entry("vua (imitated)", "vua", "VUA", 25 * MiB, "vua"),
    ]


class Process:
    """The process of a driver; its engine is imported once, for all turns."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        python = CLIENTS if entry.engine else Path(sys.executable)
        if not python.exists():
            raise Failed(f"{python} is missing: run scripts/install-clients.sh")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        command = [python, "-m", "scripts.bench.drivers.serve", entry.module, entry.driver]
        self._process = subprocess.Popen(
            [*map(str, command), str(entry.bytes_each), *entry.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=ROOT,
            env=os.environ | QUIET | {"PYTHONPATH": str(ROOT)},
        )
        self._answer()

    def turn(self, folder: Path, first: int, count: int) -> dict[str, list[float]]:
        """Run one turn on a fresh directory."""
        assert self._process.stdin is not None
        asked = {"folder": str(folder), "first": first, "count": count}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        seconds: dict[str, list[float]] = self._answer()["seconds"]
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            self._said.seek(0)
            note(self._said.read().decode(errors="replace")[-SAID:])
            raise Failed(f"{self.entry.name}: {answer['error']}")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


@contextmanager
def process(entry: Entry) -> Iterator[Process]:
    """A driver that is gone afterwards."""
    started = Process(entry)
    try:
        yield started
    finally:
        started.end()
