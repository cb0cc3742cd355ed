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
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.simulation import trace
from kvfs.simulation.trace import Prompt, Trace, read

GOOD = {"timestamp": 27, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}
LINE = json.dumps(GOOD).encode()


def changed(**fields: Any) -> bytes:  # noqa: ANN401 - any JSON
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
    assert list(read(write(pack(data)))) == [Prompt(27, 600, [1, 8]), Prompt(1.5, 0, [])]


@pytest.mark.parametrize("pack", [bytes, lzma.compress])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]) -> None:
    given = io.TextIOWrapper(io.BytesIO(pack(LINE)))
    monkeypatch.setattr(sys, "stdin", given)
    assert [request.keys for request in read("-")] == [[1, 8]]
    assert not given.buffer.closed


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match=r"^standard input: cannot be read: the input is closed$"):
        list(read("-"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: "),
        (b"\xff\xfe", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
        (b"7", "expected an object, found 7"),
        (without("timestamp"), "expected the field timestamp"),
        (without("input_length"), "expected the field input_length"),
        (without("output_length"), "expected the field output_length"),
        (without("hash_ids"), "expected the field hash_ids"),
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
        (changed(input_length=1536), "2 hash_ids for input_length 1536: expected 3 for blocks of"),
        (
            changed(input_length=1537),
            "2 hash_ids for input_length 1537: expected 3 or 4 for blocks",
        ),
        (changed(input_length=512), "2 hash_ids for input_length 512: expected 1 for blocks of"),
        (changed(input_length=511), "2 hash_ids for input_length 511: expected 0 or 1 for blocks"),
        (changed(input_length=0), "2 hash_ids for input_length 0: expected 0 for blocks of 512"),
        (b'{"id": "a", "requests": []}', "a conversation of kv-cache-tester, expected one request"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(
    write: Callable[[bytes], str], line: bytes, reason: str
) -> None:
    path = write(LINE + b"\n\n" + line + b"\n" + LINE)
    with pytest.raises(ConfigError) as raised:
        list(read(path))
    assert str(raised.value).startswith(f"{path}: line 3: {reason}")


def prompt(tokens: int, ids: int) -> bytes:
    return changed(input_length=tokens, hash_ids=list(range(ids)))


@pytest.mark.parametrize(
    ("block_tokens", "tokens", "ids"),
    [
        (512, 600, 2),
        (512, 600, 1),
        (512, 511, 0),
        (512, 512, 1),
        (64, 20064, 313),
        (64, 20064, 314),
        (16, 502, 32),
        (16, 502, 31),
        (16, 0, 0),
        (1, 3, 3),
    ],
)
def test_the_last_partial_block_has_an_id_or_none(
    write: Callable[[bytes], str], block_tokens: int, tokens: int, ids: int
) -> None:
    [request] = read(write(prompt(tokens, ids)), block_tokens)
    assert request == Prompt(27, tokens, list(range(1, ids + 1)), block_tokens)


def test_each_prompt_follows_a_rule_of_its_own(write: Callable[[bytes], str]) -> None:
    path = write(b"\n".join([prompt(130, 2), prompt(130, 3), prompt(128, 2)]))
    assert [len(request.keys) for request in read(path, 64)] == [2, 3, 2]


@pytest.mark.parametrize(
    ("block_tokens", "prompts", "cure"),
    [
        # One line says it by itself, whichever rule it follows.
        (512, [(20064, 313)], "--block-tokens 64 fits all lines so far"),
        (512, [(20064, 314)], "--block-tokens 64 fits all lines so far"),
        (512, [(502, 32)], "--block-tokens 16 fits all lines so far"),
        # 15 to 19 fit: a power of two is the likely one.
        (512, [(100, 6)], "--block-tokens 16 fits all lines so far"),
        # No power of two from 43 to 59.
        (512, [(300, 6)], "--block-tokens 43 fits all lines so far"),
        # The lines before count: 41 to 66 fit the first one, 129 and more the last.
        (64, [(200, 4), (256, 1)], "no --block-tokens fits all lines so far"),
        (64, [(64, 1), (256, 1)], "--block-tokens 256 fits all lines so far"),
        (64, [(100, 0)], "--block-tokens 128 fits all lines so far"),
        (64, [(0, 0), (100, 50)], "--block-tokens 2 fits all lines so far"),
        # Lines of different block sizes, and lines that nothing fits.
        (512, [(5120, 10), (640, 10)], "no --block-tokens fits all lines so far"),
        (512, [(3, 9)], "no --block-tokens fits all lines so far"),
        (512, [(0, 1)], "no --block-tokens fits all lines so far"),
    ],
)
def test_lengths_that_fit_neither_rule_name_the_block_size_that_would(
    write: Callable[[bytes], str], block_tokens: int, prompts: list[tuple[int, int]], cure: str
) -> None:
    path = write(b"\n".join(prompt(*one) for one in prompts))
    with pytest.raises(ConfigError) as raised:
        list(read(path, block_tokens))
    text = str(raised.value)
    assert text.startswith(f"{path}: line {len(prompts)}: {prompts[-1][1]} hash_ids for ")
    assert f" for blocks of {block_tokens} tokens; {cure}" in text


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 60)), min_size=1, max_size=4),
    st.integers(1, 99),
)
def test_sizes_that_fit_are_those_that_either_rule_allows(
    prompts: list[tuple[int, int]], block_tokens: int
) -> None:
    fitting = trace.Fitting()
    for tokens, ids in prompts:
        fitting.narrow(tokens, ids)
    each = all(
        ids in {tokens // block_tokens, -(-tokens // block_tokens)} for tokens, ids in prompts
    )
    assert (block_tokens in fitting) == each
    likely = fitting.likeliest()
    assert likely in fitting if likely is not None else not each


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


def test_missing_trace_or_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: cannot be read: No such file"):
        list(read(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        list(read(str(tmp_path)))


def test_trace_in_memory_equals_the_file() -> None:
    requests = [Prompt(0.5, 600, [1, 8]), Prompt(2.0, 0, []), Prompt(3.0, 512, [1])]
    loaded = Trace(requests, "t")
    assert list(loaded) == requests
    assert list(loaded) == requests, "it can be gone through again"
    assert (len(loaded), loaded.lookups, loaded.unique, loaded.tokens) == (3, 3, 2, 1112)


def test_a_trace_in_memory_knows_its_block_size() -> None:
    requests = [Prompt(0.5, 100, [1, 8], 64), Prompt(2.0, 130, [1, 8], 64)]
    assert list(Trace(requests, "t")) == requests


def test_the_tokens_of_a_prefix() -> None:
    request = Prompt(0, 150, [1, 2, 3], 64)
    assert [request.prefix(blocks) for blocks in range(4)] == [0, 64, 128, 150]


@pytest.mark.parametrize("requests", [[], [Prompt(0, 0, [])], [Prompt(0, 9, [])]])
def test_a_trace_without_a_block_is_empty(requests: list[Prompt]) -> None:
    with pytest.raises(ConfigError, match="t: the trace is empty"):
        Trace(requests, "t")
