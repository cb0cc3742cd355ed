"""The shared parts of fuzz tests: how many inputs they try, and input that is nearly right.

In the suite each test tries EXAMPLES inputs; scripts/fuzz.sh sets KVFS_FUZZ_EXAMPLES for long runs.
The promise is the same for every parser: any input gives a value, or the error that the parser's
docstring names; nothing else. The time grows with the length of the input.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("KVFS_FUZZ_EXAMPLES", "60"))
LONG = 64 << 10  # bytes of an input that would take for ever where time grows with its square
CPU_S = 10.0  # of the processor, which a busy machine does not change; a linear parser takes 0.1

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

# Hard input for parsers: ends of lines and texts, numbers without an end, nests, other digits.
PIECES = (
    *("\0", "\n", "\r\n", "\x1b[31m", "\u202e", "\udcff", "é", "e\u0301", "\u0663", "\\", "\\,"),
    *("..", "/", "//", "%00", "%2e", "@", "=", ",", ":", ";", "[", "]", '"', "'", "{", "}", " "),
    *("-1", "0", "1e999", "nan", "inf", "9" * 20, "9" * 5000, "1_0", "0x10", "None", "null"),
    *("[" * 3000, '{"a":' * 3000),
)


@st.composite
def spoiled(draw: st.DrawFn, right: Sequence[str]) -> str:
    """One of the texts that are right, with up to four places changed; or any text."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.text(max_size=60))
    text = draw(st.sampled_from(right))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + draw(st.sampled_from(PIECES) | st.text(max_size=4)) + text[end:]
    return text


def spoiled_bytes(right: Sequence[str | bytes]) -> st.SearchStrategy[bytes]:
    """The same of bytes, some of which are no UTF-8."""
    texts = [one if isinstance(one, str) else one.decode("latin-1") for one in right]
    return spoiled(texts).flatmap(
        lambda text: st.sampled_from(
            [text.encode("utf-8", "surrogatepass"), text.encode("latin-1", "replace")]
        )
    )


def long_ones(begin: str = "", end: str = "") -> Iterator[str]:
    """Inputs of LONG characters and more, each of one thing again and again."""
    for piece in ("a", "9", "/", "%41", "@", "-", "_1", ".", ",", "\\", "[", '{"a":', " ", "\n"):
        yield begin + piece * (LONG // len(piece)) + end
        yield begin + piece * (LONG // len(piece)) + end + "!"


@contextmanager
def in_time(what: str) -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < CPU_S, what


def answers_in_time(parse: Callable[[str], object], *right: type[Exception]) -> None:
    """Each of the long inputs has its answer, or an error that is right."""
    for text in long_ones():
        with in_time(repr(text[:20])):
            try:
                parse(text)
            except right:
                continue
