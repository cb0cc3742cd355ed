"""Chooses the blocks of an engine's requests to load and to save.

Contract: for engines that keep the cache in pages of some tokens and compute a request in steps.
`matched` counts the tokens to load, `allocated` learns their pages, `plan` returns the moves of the
next step. Of the engine it needs only the fields of `EngineRequest`. The last token of a request is
never loaded, because computing it makes the next one. Not for moving (`kvfs.connectors.paged`).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvfs.client import PrefixCache
from kvfs.connectors.paged import Load, Save
from kvfs.prefix import block_keys

_log = logging.getLogger(__name__)
# Many requests that begin alike compute at the same time, or use pages that one of them has
# computed: only the first of them saves these. After this time that save may have failed.
_SAVED_FOR_S = 60
_SAVED_MOST = 65536


class EngineRequest(Protocol):
    """The needed fields of an engine's request. all_token_ids: the tokens known so far."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Plan(NamedTuple):
    """The moves of one step."""

    loads: list[Load]
    saves: list[Save]


@dataclass
class _Progress:
    """The state of one request. keys: of its whole blocks, as far as they were needed.

    - cached: the number of blocks that need no save.
    - local, until: tokens between which the last match is to be loaded; until is 0 if nothing is.
    """

    request: EngineRequest
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    local: int = 0
    until: int = 0


class EngineRequests:
    """Requests that have begun and not finished. pages: the tokens of an engine's page."""

    def __init__(self, cache: PrefixCache, page_tokens: int, *, loads: bool, saves: bool) -> None:
        self._cache = cache
        self._page = page_tokens
        self._block = cache.spec.block_tokens
        self._loads, self._saves = loads, saves
        self._known: dict[str, _Progress] = {}
        self._begun: list[Load] = []
        self._saved: OrderedDict[bytes, float] = OrderedDict()  # the time of each save

    def add(self, request: EngineRequest) -> bool:
        """Take on a request; False if `Spec.keys` does not take all of its tokens."""
        if request.request_id not in self._known:
            progress = _Progress(request)
            try:
                self._extend(progress, len(request.all_token_ids) // self._block)
            except (TypeError, ValueError) as error:
                _log.warning("request %s is not cached: %s", request.request_id, error)
                return False
            self._known[request.request_id] = progress
        return True

    def matched(self, request: EngineRequest, computed: int) -> int:
        """Return the number of tokens, after the first `computed`, that can be loaded."""
        progress = self._known[request.request_id]
        progress.local, progress.until = computed, 0
        self._extend(progress, len(request.all_token_ids) // self._block)
        try:
            found = self._cache.match_keys(self._cache.spec.root, progress.keys)
        except OSError as error:
            _log.warning("nothing is loaded from %s: %s", self._cache.path, error)
            return 0
        progress.cached = found.blocks
        most = (request.num_tokens - 1) // self._page * self._page
        return max(0, min(found.tokens, most) - computed) if self._loads else 0

    def allocated(self, request: EngineRequest, pages: Sequence[int], tokens: int) -> None:
        """Load that many of the matched tokens. pages: all pages of the request."""
        progress = self._known[request.request_id]
        begin, progress.until = progress.local, progress.local + tokens
        first, last = begin // self._block, -(-progress.until // self._block)
        self._begun.append(
            Load(
                request.request_id,
                self._parent(progress, first),
                progress.keys[first:last],
                list(pages[begin // self._page : -(-progress.until // self._page)]),
                (begin - first * self._block) // self._page,
            )
        )

    def plan(
        self, scheduled: Mapping[str, int], pages_of: Callable[[str], Sequence[int] | None]
    ) -> Plan:
        """Return the moves for a step that computes that many tokens of each request."""
        begun, self._begun = self._begun, []
        saves = []
        if self._saves:
            self._forget()
            for name, tokens in scheduled.items():
                if (progress := self._known.get(name)) is not None:
                    save = self._save(progress, tokens, pages_of)
                    saves += [save] if save else []
        return Plan(begun, saves)

    def finished(self, name: str) -> None:
        self._known.pop(name, None)

    def _save(
        self, progress: _Progress, tokens: int, pages_of: Callable[[str], Sequence[int] | None]
    ) -> Save | None:
        request = progress.request
        if progress.until:
            if request.num_computed_tokens < progress.until:  # some are gone: computed here
                progress.cached = request.num_computed_tokens // self._block
            progress.until = 0
        # Tokens that were guessed, or are not known yet, do not belong to the request.
        computed = min(request.num_computed_tokens + tokens, len(request.all_token_ids))
        begin, end = progress.cached, computed // self._block
        if end <= begin:
            return None
        self._extend(progress, end)
        progress.cached = end
        while begin < end and progress.keys[begin] in self._saved:
            begin += 1
        pages = pages_of(request.request_id)
        if begin == end or pages is None:
            return None
        keys = progress.keys[begin:end]
        for key in keys:
            self._saved.pop(key, None)
            self._saved[key] = time.monotonic()
        each = self._block // self._page
        return Save(self._parent(progress, begin), keys, list(pages[begin * each : end * each]))

    def _forget(self) -> None:
        """Forget keys that were given to be saved long ago."""
        begin = time.monotonic() - _SAVED_FOR_S
        while self._saved:
            key, at = next(iter(self._saved.items()))
            if at > begin and len(self._saved) <= _SAVED_MOST:
                break
            del self._saved[key]

    def _extend(self, progress: _Progress, blocks: int) -> None:
        """Compute the keys of at least that many blocks."""
        have = len(progress.keys)
        if blocks > have:
            tokens = progress.request.all_token_ids[have * self._block : blocks * self._block]
            progress.keys += block_keys(self._parent(progress, have), list(tokens), self._block)

    def _parent(self, progress: _Progress, block: int) -> bytes:
        return progress.keys[block - 1] if block else self._cache.spec.root
