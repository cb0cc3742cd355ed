"""Request traces of an inference service, in the format of Mooncake's release.

Contract: JSON lines, one for each request, plain or compressed with xz or gzip:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

timestamp in ms; the lengths in tokens; hash_ids of the prompt's blocks in order, each chained to
those before it, so that one id stands for one prefix. All blocks of a trace have the same number of
tokens, 512 unless the caller says another. A last block that is partly filled has an id, or none:
each prompt may follow either rule. Any difference from that is a ConfigError. It names file, line
and reason, and the block size that would fit if there is one. Format: FAST'25 release of
https://github.com/kvcache-ai/Mooncake, "Mooncake: Trading More Storage for Less Computation".
"""

import contextlib
import gzip
import io
import json
import lzma
import math
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvfs.errors import ConfigError

BLOCK_TOKENS = 512
LONGEST_LINE = 16 << 20  # bytes; a prompt of a billion tokens, so a larger one is no trace
LARGEST_ID = (1 << 63) - 2  # its key must fit 63 bits
_MAGIC = 6  # bytes that tell the compression

Advance = Callable[[int], object]  # hears the number of further requests done


def unheard(_requests: int) -> None:
    """Ignore progress."""


class Prompt(NamedTuple):
    """A prompt. `keys` are those of its blocks: hash id + 1, as 0 stands for no parent."""

    timestamp_ms: float
    tokens: int
    keys: list[int]
    block_tokens: int = BLOCK_TOKENS

    def prefix(self, blocks: int) -> int:
        """Return the number of tokens in the first `blocks` blocks."""
        return min(blocks * self.block_tokens, self.tokens)


class Hits(NamedTuple):
    """The lookups and the hits, for the simulator and for the replay alike.

    An engine can use a prefix only, so tokens count up to the first missing block. Objects count
    wherever they are found. Tokens of a last block without a hash are never a hit: no cache stores
    them. Ratios are between 0 and 1.
    """

    tokens: int = 0
    token_hits: int = 0
    objects: int = 0
    object_hits: int = 0
    peer_hits: int = 0  # of object_hits, those that another node of a pool had

    @property
    def token_ratio(self) -> float:
        """Return the tokens in the prefixes that were found, as a share of all prompts' tokens."""
        return self.token_hits / self.tokens if self.tokens else 0.0

    @property
    def object_ratio(self) -> float:
        """Return the share of the looked-up blocks that were found."""
        return self.object_hits / self.objects if self.objects else 0.0

    @property
    def peer_ratio(self) -> float:
        """Return the share of the looked-up blocks that came from another node."""
        return self.peer_hits / self.objects if self.objects else 0.0

    def and_request(self, request: Prompt, found: Sequence[bool], from_peers: int = 0) -> "Hits":
        """Return the sum with one more request; `found`: whether each of its blocks was found."""
        prefix = next((depth for depth, hit in enumerate(found) if not hit), len(found))
        return Hits(
            self.tokens + request.tokens,
            self.token_hits + request.prefix(prefix),
            self.objects + len(found),
            self.object_hits + sum(found),
            self.peer_hits + from_peers,
        )


class Fitting:
    """The block sizes, in tokens, that fit all prompts so far.

    A prompt of t tokens and n ids allows the sizes from t/(n+1) to t/(n-1), without both ends. Up
    to t/n its partial block has no id, from there on it has one. So the sizes are always one range.
    """

    def __init__(self) -> None:
        self._least, self._most = 1, math.inf

    def narrow(self, tokens: int, ids: int) -> None:
        """Remove the sizes that do not fit this prompt."""
        if tokens:
            self._least = max(self._least, tokens // (ids + 1) + 1)
            if ids > 1:
                self._most = min(self._most, (tokens - 1) // (ids - 1))
        elif ids:
            self._most = 0

    def __contains__(self, block_tokens: int) -> bool:
        return self._least <= block_tokens <= self._most

    def likeliest(self) -> int | None:
        """Return the smallest power of two, else the smallest number; None if nothing fits."""
        power = 1 << (self._least - 1).bit_length()
        return next((size for size in (power, self._least) if size in self), None)


def read(path: str, block_tokens: int = BLOCK_TOKENS) -> Iterator[Prompt]:
    """Yield the requests of the file, `-` for standard input; ConfigError names the mistake."""
    name = "standard input" if path == "-" else path
    number, fitting = 0, Fitting()
    try:
        with _raw(path) as raw, _unpacked(raw) as lines:
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"longer than {LONGEST_LINE} bytes")
                if line.strip():
                    yield _request(line, block_tokens, fitting)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{name}: damaged after line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: line {number}: {error}") from error


@contextlib.contextmanager
def _raw(path: str) -> Iterator[io.BufferedReader]:
    """Give the raw file from its beginning; standard input stays open."""
    if path != "-":
        with open(path, "rb") as file:
            yield file
        return
    if sys.stdin is None:
        raise OSError("the input is closed")
    file = io.BufferedReader(sys.stdin.buffer)  # type: ignore[arg-type]  # reads as a raw one does
    try:
        yield file
    finally:
        file.detach()


@contextlib.contextmanager
def _unpacked(raw: io.BufferedReader) -> Iterator[io.BufferedReader]:
    begin = raw.peek(_MAGIC)[:_MAGIC]
    if begin.startswith(b"\xfd7zXZ\0"):
        with lzma.LZMAFile(raw) as file:
            yield io.BufferedReader(file)
    elif begin.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=raw) as file:
            yield io.BufferedReader(file)
    elif begin.startswith(b"\x28\xb5\x2f\xfd"):
        raise OSError("the file is compressed with zstd: give it as zstd -dc FILE | kvfs ... -")
    else:
        yield raw


def _request(line: bytes, block_tokens: int, fitting: Fitting) -> Prompt:
    """Parse one line; ValueError names the mistake."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {_short(record)}")  # noqa: TRY004 - one kind
    if "requests" in record and "timestamp" not in record:
        raise ValueError(
            "a conversation of kv-cache-tester, expected one request: docs/simulate.md converts it"
        )
    timestamp = _field(record, "timestamp")
    if type(timestamp) not in {int, float} or not 0 <= timestamp < math.inf:
        raise ValueError(f"timestamp {_short(timestamp)}: expected milliseconds, 0 or more")
    tokens = _count(record, "input_length")
    _count(record, "output_length")
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids {_short(ids)}: expected a list")  # noqa: TRY004 - one kind
    for one in ids:
        if type(one) is not int or not 0 <= one <= LARGEST_ID:
            raise ValueError(f"hash_ids has {_short(one)}: expected integers from 0 to 2^63-2")
    fitting.narrow(tokens, len(ids))
    _check_number(tokens, len(ids), block_tokens, fitting)
    return Prompt(float(timestamp), tokens, [one + 1 for one in ids], block_tokens)


def _check_number(tokens: int, ids: int, block_tokens: int, fitting: Fitting) -> None:
    """Raise ValueError if the number of ids fits neither the full blocks nor all blocks."""
    full, begun = tokens // block_tokens, -(-tokens // block_tokens)
    if ids in {full, begun}:
        return
    expected = f"{full}" if full == begun else f"{full} or {begun}"
    likeliest = fitting.likeliest()
    cure = (
        "no --block-tokens fits all lines so far: correct this line or leave it out"
        if likeliest is None
        else f"--block-tokens {likeliest} fits all lines so far"
    )
    raise ValueError(
        f"{ids} hash_ids for input_length {tokens}: expected {expected} "
        f"for blocks of {block_tokens} tokens; {cure}"
    )


def _field(record: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - JSON
    if name not in record:
        raise ValueError(f"expected the field {name}")
    return record[name]


def _count(record: dict[str, Any], name: str) -> int:
    value = _field(record, name)
    if type(value) is not int or not 0 <= value <= LARGEST_ID:
        raise ValueError(f"{name} {_short(value)}: expected a number of tokens, 0 or more")
    return value


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - a line stays readable


class Trace:
    """A trace in memory, for many passes.

    It takes about 8 bytes for each lookup and 24 for each request; while it is read, about 90 more
    for each block. `lookups` and `unique` count blocks, `tokens` those of all prompts; the blocks
    of all requests have as many tokens. ConfigError, with that `name`, if there is not one block in
    it.
    """

    def __init__(self, requests: Iterable[Prompt], name: str) -> None:
        self._keys = array("q")
        self._ends = array("q")
        self._tokens = array("q")
        self._times = array("d")
        self._block_tokens = BLOCK_TOKENS
        unique: set[int] = set()
        for request in requests:
            self._keys.extend(request.keys)
            unique.update(request.keys)
            self._ends.append(len(self._keys))
            self._tokens.append(request.tokens)
            self._times.append(request.timestamp_ms)
            self._block_tokens = request.block_tokens
        self.lookups, self.unique, self.tokens = len(self._keys), len(unique), sum(self._tokens)
        if not unique:
            raise ConfigError(f"{name}: the trace is empty: {len(self)} requests without a block")

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Prompt]:
        begin = 0
        for time, tokens, end in zip(self._times, self._tokens, self._ends, strict=True):
            yield Prompt(time, tokens, self._keys[begin:end].tolist(), self._block_tokens)
            begin = end
