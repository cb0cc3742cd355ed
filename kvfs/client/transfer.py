"""Moves blocks between files and tensors that need more than a read: to a device, or lossy.

Contract: a file's bytes reach a device in one of two ways:

- "pinned": a thread reads them into a page-locked buffer, which is used again once the copy out of
  it has ended.
- "register": the mapping of the file itself is page-locked, and copied from.

The first load of at least `MEASURED_FROM` blocks measures which way is faster, and the choice is
kept. Copies run beside the reads of other blocks; they have ended before a function returns.
`Device` has all operations of a device, so that tests can replace it. `Cuda` has not been run:
there was no GPU to run it on. Not for the form of a block's tensor (`kvfs.client.arguments`).
"""

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

import torch

from kvfs.client import files, memory
from kvfs.client.arguments import BlockTensors
from kvfs.client.leased import LeasedReader
from kvfs.client.spec import Spec
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads

log = logging.getLogger(__name__)

Done = Callable[[], object]
_READ_ONLY = 8  # cudaHostRegisterReadOnly, driver_types.h
Way = Literal["pinned", "register"]
MEASURED_FROM = 16  # blocks, half of them each way


def _nothing() -> None:
    """Return at once: there is nothing to wait for."""


class Device(Protocol):
    """The operations of a device. Any thread may call them."""

    def begin(self) -> Done:
        """Note the position of the caller's stream; the result makes later copies wait for it."""

    def pinned(self, size: int) -> torch.Tensor:
        """Return a page-locked buffer, uint8 of `size`."""

    def run(self, work: Callable[[], object]) -> Done:
        """Begin the torch operations of `work`; the result waits for their end."""

    def register(self, pages: torch.Tensor) -> Done | None:
        """Lock a mapping's pages; the result undoes it. None: they cannot be locked."""


class Host:
    """The CPU, for blocks that are stored in another form."""

    def begin(self) -> Done:
        return _nothing

    def pinned(self, size: int) -> torch.Tensor:
        return memory.new((size,), torch.uint8)

    def run(self, work: Callable[[], object]) -> Done:
        work()
        return _nothing

    def register(self, pages: torch.Tensor) -> Done | None:  # noqa: ARG002 (any pages will do)
        return _nothing


class Cuda:
    """A CUDA device, with one stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def begin(self) -> Done:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return lambda: self._stream.wait_event(event)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def run(self, work: Callable[[], object]) -> Done:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return event.synchronize

    def register(self, pages: torch.Tensor) -> Done | None:
        runtime, address = torch.cuda.cudart(), pages.data_ptr()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(address, pages.numel(), _READ_ONLY))
        if code:
            log.info("cudaHostRegister of %d bytes: error %d", pages.numel(), code)
            # The runtime remembers the error, and torch would raise it at the engine's next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)
            return None

        return lambda: runtime.cudaHostUnregister(address)


class Buffer:
    """A page-locked buffer, and whether a copy still reads it or writes it."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages
        self.busy: Done = lambda: None


class Transfer:
    """Blocks of one cache to one device and back. Any number of threads."""

    def __init__(self, device: Device, spec: Spec, threads: Threads, stats: Stats) -> None:
        self.way: Way | None = None  # None: not measured yet
        self._refused = False  # the device refused to lock the pages of files
        self._device = device
        self._spec = spec
        self._threads = threads
        self._stats = stats
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._made = 0

    def begin(self) -> Done:
        """Note the caller's stream, which must be current; `load` or `content` take the result."""
        return self._device.begin()

    def load(self, chain: LeasedReader, targets: BlockTensors, after: Done) -> int:
        """Return the number of blocks in `targets`, which are on the device."""
        after()
        if self.way is not None or len(chain) < MEASURED_FROM:
            return self._load(self.way or "pinned", chain, targets)
        half = len(chain) // 2
        begun = time.perf_counter()
        count = self._load("pinned", chain.part(0, half), targets[:half])
        between = time.perf_counter()
        if count < half:
            return count
        count += self._load("register", chain.part(half, len(chain)), targets[half:])
        ended = time.perf_counter()
        if count == len(chain) and not self._refused:
            pinned, register = (between - begun) / half, (ended - between) / (count - half)
            self.way = "register" if register < pinned else "pinned"
            log.info(
                "a block to the device: %.2f ms by a pinned buffer, %.2f ms registered: %s",
                *(pinned * 1e3, register * 1e3, self.way),
            )
        return count

    def _load(self, way: Way, chain: LeasedReader, targets: BlockTensors) -> int:
        ends: list[Done] = []

        def read(at: int, fd: int) -> None:
            if way == "pinned" or not self._registered(chain, at, fd, targets[at], ends):
                with self.buffer() as buffer:
                    files.read_into(fd, memory.view(buffer.pages))
                    buffer.busy = self._fill(targets[at], buffer.pages)
                    ends.append(buffer.busy)

        try:
            registers = way == "register"
            return chain.read(read, threads=self._threads, stats=self._stats, mapped=registers)
        finally:
            for end in ends:
                end()

    def _registered(
        self, chain: LeasedReader, at: int, fd: int, target: torch.Tensor, ends: list[Done]
    ) -> bool:
        pages = chain.map(at, fd, shared=True)
        undo = self._device.register(pages)
        if undo is None:
            self.way, self._refused = "pinned", True
            return False
        copied = self._fill(target, pages)

        def end() -> None:
            try:
                copied()
            finally:
                undo()
            _ = pages  # mapped until here

        ends.append(end)
        return True

    @contextmanager
    def content(self, block: torch.Tensor, after: Done) -> Iterator[memory.Runs]:
        """Give the bytes of a block that is on the device."""
        with self.buffer() as buffer:
            after()
            self._store(block, buffer.pages)()
            yield memory.view(buffer.pages)

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Give an unused buffer. There are twice as many as threads, for the copies."""
        with self._lock:
            if self._free.empty() and self._made < 2 * self._threads.count:
                self._made += 1
                self._free.put(Buffer(self._device.pinned(self._spec.stored_bytes)))
        buffer = self._free.get()
        try:
            buffer.busy()
            yield buffer
        finally:
            self._free.put(buffer)

    def _fill(self, target: torch.Tensor, pages: torch.Tensor) -> Done:
        stored = self._spec.stored
        if stored.raw:
            block = pages.view(self._spec.torch_dtype).view(self._spec.shape)
            return self._device.run(lambda: target.copy_(block, non_blocking=True))

        def decode() -> None:
            try:
                stored.decode(pages.to(target.device, non_blocking=True), target)
            except ValueError as error:  # no spec with this fingerprint has written these bytes
                raise OSError(errno.EIO, str(error)) from error

        return self._device.run(decode)

    def _store(self, block: torch.Tensor, pages: torch.Tensor) -> Done:
        stored = self._spec.stored
        if stored.raw:
            target = pages.view(self._spec.torch_dtype).view(self._spec.shape)
            return self._device.run(lambda: target.copy_(block, non_blocking=True))
        if block.device == pages.device:
            return self._device.run(lambda: stored.encode(block, pages))
        return self._device.run(lambda: pages.copy_(stored.encode(block), non_blocking=True))
