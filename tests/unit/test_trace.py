"""Traces as they are read: what is in them, and the line and reason where they are wrong."""

import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.simulation import trace
from kvfs.simulation.trace import Request, Trace, read

GOOD = {"timestamp": 27, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}
LINE = json.dumps(GOOD).encode()


def changed(**fields: Any) -> bytes:  # noqa: ANN401 - whatever JSON can say
    return json.dumps(GOOD | fields).encode()


def without(field: str) -> bytes:
    return json.dumps({name: value for name, value in GOOD.items() if name != field}).encode()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], str]:
    def make(data: bytes) -> str:
        path = tmp_path / "trace"
        path.write_bytes(data)
        return str(path)

    return make


@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress])
def test_plain_and_compressed_traces(
    write: Callable[[bytes], str], pack: Callable[[bytes], bytes]
) -> None:
    data = LINE + b"\n\n  \n" + changed(timestamp=1.5, input_length=0, hash_ids=[])
    assert list(read(write(pack(data)))) == [Request(27, 600, [1, 8]), Request(1.5, 0, [])]


@pytest.mark.parametrize("pack", [bytes, lzma.compress])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    given = io.TextIOWrapper(io.BytesIO(pack(LINE)))
    monkeypatch.setattr(sys, "stdin", given)
    assert [request.keys for request in read("-")] == [[1, 8]]
    assert not given.buffer.closed


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match=r"^standard input: cannot be read: it is closed$"):
        list(read("-"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: "),
        (b"\xff\xfe", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"7", "expected an object, found 7"),
        (without("timestamp"), "there is no timestamp"),
        (without("input_length"), "there is no input_length"),
        (without("output_length"), "there is no output_length"),
        (without("hash_ids"), "there is no hash_ids"),
        (changed(timestamp="27"), 'timestamp "27": expected milliseconds'),
        (changed(timestamp=-1), "timestamp -1: expected"),
        (changed(timestamp=float("nan")), "timestamp NaN: expected"),
        (changed(timestamp=True), "timestamp true: expected"),
        (changed(input_length=600.0), "input_length 600.0: expected a number of tokens"),
        (changed(output_length=-1), "output_length -1: expected a number of tokens"),
        (changed(hash_ids="0 7"), 'hash_ids "0 7": expected a list'),
        (changed(hash_ids=[0, "x" * 99]), 'hash_ids has "' + "x" * 36 + "..."),
        (changed(hash_ids=[0, -1]), "hash_ids has -1: expected integers"),
        (changed(hash_ids=[0, 2**63 - 1]), "hash_ids has 9223372036854775807: expected"),
        (changed(hash_ids=[0, True]), "hash_ids has true: expected integers"),
        (changed(input_length=1025), "2 hash_ids for input_length 1025: expected 3, one for each"),
        (changed(input_length=512), "2 hash_ids for input_length 512: expected 1, one for each"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(
    write: Callable[[bytes], str], line: bytes, reason: str
) -> None:
    path = write(LINE + b"\n\n" + line + b"\n" + LINE)
    with pytest.raises(ConfigError) as raised:
        list(read(path))
    assert str(raised.value).startswith(f"{path}: line 3: {reason}")


def test_a_line_without_end_is_not_read_to_its_end(
    write: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LONGEST_LINE", len(LINE) + 1)
    path = write(LINE + b"\n" + b" " * 99 + LINE)
    with pytest.raises(ConfigError, match=r"line 2: longer than \d+ bytes$"):
        list(read(path))


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_a_compressed_trace_that_is_cut(
    write: Callable[[bytes], str], pack: Callable[[bytes], bytes]
) -> None:
    path = write(pack(LINE)[:-12])
    with pytest.raises(ConfigError, match="damaged after line"):
        list(read(path))


def test_zstd_is_left_to_its_own_program(write: Callable[[bytes], str]) -> None:
    with pytest.raises(ConfigError, match=r"compressed with zstd: give it as zstd -dc"):
        list(read(write(b"\x28\xb5\x2f\xfd....")))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: cannot be read: No such file"):
        list(read(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        list(read(str(tmp_path)))


def test_a_trace_in_memory_is_what_was_read() -> None:
    requests = [Request(0.5, 600, [1, 8]), Request(2.0, 0, []), Request(3.0, 512, [1])]
    loaded = Trace(requests, "t")
    assert list(loaded) == requests
    assert list(loaded) == requests, "it can be gone through again"
    assert (len(loaded), loaded.lookups, loaded.unique, loaded.tokens) == (3, 3, 2, 1112)


@pytest.mark.parametrize("requests", [[], [Request(0, 0, [])]])
def test_a_trace_without_a_block_is_empty(requests: list[Request]) -> None:
    with pytest.raises(ConfigError, match="t: the trace is empty"):
        Trace(requests, "t")
