"""Moves blocks between a prefix cache and an engine's paged memory, beside the engine's steps.

Contract: `Mover` loads into pages on threads of its own. It reports the end of each load, and the
pages that are missing. It reads pages to save while the caller waits, and writes files later. No
failure is raised through a step: a block that is gone is missing pages, and a block that cannot be
saved is a miss later. Needs torch and `kvfs.client` alone. Not for the choice of blocks
(`kvfs.connectors.scheduling`).
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kvfs.client import PrefixCache

_log = logging.getLogger(__name__)
_LOADING_BYTES = 256 << 20  # of host memory for each load that runs


class Load(NamedTuple):
    """Blocks to load for a request.

    pages: the targets, beginning with the page after the first `skip` pages of the first block;
    there may be fewer than the blocks have.
    """

    request: str
    parent: bytes
    keys: list[bytes]
    pages: list[int]
    skip: int


class Save(NamedTuple):
    """Blocks to save, and all of their pages."""

    parent: bytes
    keys: list[bytes]
    pages: list[int]


class PagedMemory:
    """All layers of an engine's cache.

    layers: `[pages * parts, heads, tokens, numbers]` each, with any strides: a page may be cut into
    parts of equal numbers of tokens. All have one shape, dtype and device. Raises ValueError.
    """

    def __init__(self, layers: Sequence[torch.Tensor], pages: int) -> None:
        shapes = {(tuple(layer.shape), layer.dtype, layer.device) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"layers: expected one shape, dtype and device, got {shapes}")
        ((shape, self.dtype, self.device),) = shapes
        if len(shape) != 4 or shape[0] % pages:  # noqa: PLR2004  (as the docstring says)
            raise ValueError(
                f"layers: expected ({pages} pages * parts, heads, tokens, numbers), got {shape}"
            )
        # Pages, parts of a page, tokens of a part, heads, numbers.
        self._layers = [
            _plain(layer).view(pages, -1, *shape[1:]).permute(0, 1, 3, 2, 4) for layer in layers
        ]
        self._page = self._layers[0].shape[1:]
        self.page_tokens = self._page[0] * self._page[1]

    def axes(self, tokens: int) -> dict[str, int]:
        return {
            "layer": len(self._layers),
            "token": tokens,
            "head": self._page[2],
            "content": self._page[3],
        }

    def read(self, pages: Sequence[int], block: torch.Tensor) -> None:
        """Fill a block, on the host, with all its pages; a GPU does it in its stream's order."""
        at = self._numbers(pages)
        for layer, part in zip(self._layers, _plain(block), strict=True):
            found = layer.index_select(0, at).view(part.shape)
            part.copy_(found, non_blocking=True)

    def write(self, block: torch.Tensor, skip: int, pages: Sequence[int]) -> None:
        """Copy a block's pages, from the one after the first `skip` on, to `pages`."""
        at = self._numbers(pages)
        for layer, part in zip(self._layers, _plain(block), strict=True):
            found = part.view(-1, *self._page)[skip : skip + len(pages)]
            layer.index_copy_(0, at, found.to(self.device, non_blocking=True))

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the numbers on the device, without waiting for its stream."""
        numbers = torch.tensor(pages)
        if self.device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(self.device, non_blocking=True)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats as bytes, because torch cannot copy them by index."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class Mover:
    """Moves blocks of one cache's shard.

    - staging_bytes: the most host memory for blocks that wait to be written. Blocks beyond that are
      not saved.
    - saves: whether this process is the one that saves.
    - threads: loads that run at a time.
    """

    def __init__(
        self,
        cache: PrefixCache,
        memory: PagedMemory,
        *,
        staging_bytes: int,
        saves: bool = True,
        threads: int = 4,
    ) -> None:
        size = cache.spec.block_bytes
        if staging_bytes < size:
            raise ValueError(f"staging_bytes={staging_bytes}: expected at least a block, {size}")
        self.unsaved = 0  # blocks for which there was no room
        self._cache = cache
        self._memory = memory
        self._saves = saves
        self._block_pages = cache.spec.block_tokens // memory.page_tokens
        self._loads: dict[str, tuple[Load, Future[int]]] = {}
        self._loaders = ThreadPoolExecutor(threads, "kvfs-load")
        # One thread, because a block cannot be saved before the one that comes before it.
        self._saver = ThreadPoolExecutor(1, "kvfs-save")
        self._room = staging_bytes // size
        self._lock = threading.Lock()
        cuda = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if cuda else None  # type: ignore[no-untyped-call]

    def load(self, load: Load) -> None:
        """Begin a load, after the present work of the caller's stream."""
        run = self._loaders.submit(self._load, load, self._mark())
        self._loads[load.request] = (load, run)

    def loaded(self) -> tuple[set[str], set[int]]:
        """Return requests whose loads have ended since the last call, and the missing pages.

        The missing pages are all from the first block that was gone on.
        """
        ended = {name: load for name, (load, run) in self._loads.items() if run.done()}
        missing: set[int] = set()
        for name, load in ended.items():
            _, run = self._loads.pop(name)
            have = run.result() * self._block_pages - load.skip
            missing.update(load.pages[max(0, have) :])
        return set(ended), missing

    def save(self, save: Save) -> None:
        """Read the pages; write the files later."""
        if not self._saves:
            return
        with self._lock:
            count = min(len(save.keys), self._room)
            self._room -= count
        if count < len(save.keys):
            if not self.unsaved:
                _log.warning(
                    "blocks are not saved: more than staging_bytes of blocks wait for %s; such "
                    "blocks are only counted from now on",
                    self._cache.path,
                )
            self.unsaved += len(save.keys) - count
        if not count:
            return
        try:
            spec = self._cache.spec
            pinned = self._stream is not None
            shape = (count, *spec.shape)
            blocks = torch.empty(shape, dtype=spec.torch_dtype, pin_memory=pinned)
            with torch.inference_mode():
                for at, block in enumerate(blocks):
                    begin = at * self._block_pages
                    self._memory.read(save.pages[begin : begin + self._block_pages], block)
            self._saver.submit(self._save, save, blocks, self._mark())
        except RuntimeError:  # torch's, of memory above all
            self._free(count)
            _log.exception("%d blocks are not saved", count)

    def close(self) -> None:
        """Wait for all running moves."""
        self._loaders.shutdown()
        self._saver.shutdown()

    def _load(self, load: Load, begun: torch.cuda.Event | None) -> int:
        """Load blocks; return the number, from the first, that are in their pages."""
        spec = self._cache.spec
        most = max(1, min(len(load.keys), _LOADING_BYTES // spec.block_bytes))
        done = 0
        try:
            with torch.inference_mode(), self._after(begun):
                pinned = self._stream is not None
                blocks = torch.empty((most, *spec.shape), dtype=spec.torch_dtype, pin_memory=pinned)
                chain = [load.parent, *load.keys]
                while keys := load.keys[done : done + most]:
                    count = self._cache.load_keys(chain[done], keys, blocks[: len(keys)]).blocks
                    for at in range(count):
                        self._write(load, done + at, blocks[at])
                    if self._stream is not None:
                        self._stream.synchronize()
                    done += count
                    if count < len(keys):
                        break
        except Exception:  # noqa: BLE001  (the engine computes missing pages)
            _log.exception("request %s: %d of its blocks loaded", load.request, done)
        return done

    def _write(self, load: Load, at: int, block: torch.Tensor) -> None:
        first = at * self._block_pages - load.skip  # the place of the block's first page
        skip = max(0, -first)
        pages = load.pages[first + skip : first + self._block_pages]
        if pages:
            self._memory.write(block, skip, pages)

    def _save(self, save: Save, blocks: torch.Tensor, read: torch.cuda.Event | None) -> None:
        try:
            if read is not None:
                read.synchronize()
            self._cache.save_keys(save.parent, save.keys[: len(blocks)], blocks)
        except Exception:  # noqa: BLE001  (no caller waits for it)
            _log.exception("%d blocks are not saved", len(blocks))
        finally:
            self._free(len(blocks))

    def _free(self, count: int) -> None:
        with self._lock:
            self._room += count

    def _mark(self) -> torch.cuda.Event | None:
        """Return a mark after the present work of the caller's stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._memory.device))
        return event

    @contextlib.contextmanager
    def _after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None or event is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield
