"""vLLM's `fs` tier for KV offloading: a file, and a directory, for each block, with O_DIRECT.

vLLM moves the new blocks of a request from its primary tier, in host memory, by one job. A job is
done by one thread of the tier, in C, block after block. Here a job has up to 16 blocks.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from scripts.bench.drivers.driver import Connector, Content, WrongBytesError, timed

JOB = 16  # blocks


class Spec:
    """The fields of an OffloadingSpec that the tier reads."""

    blocks_per_chunk = 1
    kv_events_config = None
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig("meta-llama/Llama-3.1-8B", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, 0, is_parallelism_agnostic=True),
    )


class VLLMFs(Connector):
    """FileSystemTierManager as vLLM's tiering manager calls it."""

    def __init__(self, bytes_each: int) -> None:
        self._content = Content(bytes_each)
        memory = mmap.mmap(-1, JOB * bytes_each)  # aligned, as O_DIRECT wants it
        self._blocks = torch.frombuffer(memory, dtype=torch.uint8).view(JOB, bytes_each)
        self._blocks.zero_()
        self._view: Any = self._blocks.numpy().data
        self._request: Any = ReqContext(req_id="bench")
        self._jobs = 0
        self._tier: Any = None

    def start(self, folder: Path) -> None:
        spec: Any = Spec()
        self._tier = FileSystemTierManager(spec, self._view, "fs", str(folder))

    def stop(self) -> None:
        self._tier.shutdown()

    def put(self, numbers: range) -> list[float]:
        seconds = []
        for job in _jobs(numbers):
            for at, number in enumerate(job):
                self._content.fill(self._blocks[at], number)
            seconds.append(timed(self._run, self._tier.submit_store, job))
        return seconds

    def get(self, numbers: range) -> list[float]:
        seconds = []
        for job in _jobs(numbers):
            self._blocks.zero_()
            self._expect(job)
            seconds.append(timed(self._run, self._tier.submit_load, job))
            for at, number in enumerate(job):
                self._content.check(self._blocks[at], number)
        return seconds

    def _run(self, submit: Any, numbers: range) -> None:  # noqa: ANN401 (vLLM's)
        self._jobs += 1
        keys, chunks = [_key(number) for number in numbers], np.arange(len(numbers))
        submit(TransferJob(self._jobs, keys, chunks, False, self._request))  # noqa: FBT003 (vLLM's)
        self._tier.drain_jobs()
        if not all(job.success for job in self._tier.get_finished_jobs()):
            raise WrongBytesError("a job of blocks failed")

    def _expect(self, numbers: range) -> None:
        """Every block is found, by the lookups of a step of the scheduler."""
        for number in numbers:
            while (found := self._tier.lookup(_key(number), self._request)) == LookupResult.RETRY:
                self._tier._lookup_manager.flush()  # noqa: SLF001 (a step ends)
            if found != LookupResult.HIT:
                raise WrongBytesError(f"block {number} is missing")


def _jobs(numbers: range) -> list[range]:
    return [numbers[at : at + JOB] for at in range(0, len(numbers), JOB)]


def _key(number: int) -> Any:  # noqa: ANN401 (vLLM's)
    """A hash as sha256 gives it, whose directories differ from block to block."""
    return make_offload_key(np.random.Philox(number).random_raw(4).tobytes(), 0)
