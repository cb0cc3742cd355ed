"""Where tensors are: page-locked memory for its copies, and work that it does by itself.

Contract: `Device` is all that `kvfs.client.transfer` asks, so that tests can stand in for one.
`Cuda` has not been run: there was no GPU to run it on. Not for files.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import torch

from kvfs.client import memory

log = logging.getLogger(__name__)

Done = Callable[[], object]
_READ_ONLY = 8  # cudaHostRegisterReadOnly, driver_types.h


def _nothing() -> None:
    """There is nothing to wait for."""


class Device(Protocol):
    """What a device can do. Called by any thread."""

    def begin(self) -> Done:
        """Note where the caller's stream is; the result makes later copies wait for that."""

    def pinned(self, size: int) -> torch.Tensor:
        """A page-locked buffer, uint8 of `size`."""

    def run(self, work: Callable[[], object]) -> Done:
        """Begin what `work` has torch do; the result waits for its end."""

    def register(self, pages: torch.Tensor) -> Done | None:
        """Lock a mapping's pages; the result undoes it. None: it can not be done."""


class Host:
    """The CPU, for blocks that are not stored as they are."""

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
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)
            return None

        return lambda: runtime.cudaHostUnregister(address)
