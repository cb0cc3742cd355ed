"""Questions about leases: their bytes."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import leasing, prefix
from kvfs.errors import InvalidError
from kvfs.leasing import LeaseRequest

ROOT = prefix.root_key("a fingerprint")
KEYS = prefix.block_keys(ROOT, range(65), 1)
HERE = Path(__file__).parent
NUMBERS = st.integers(0, (1 << 64) - 1)


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=64),
    st.from_regex(r"([0-9A-Za-z_-]{1,32})?", fullmatch=True).filter(lambda text: text != "tmp"),
    NUMBERS,
    NUMBERS,
    st.integers(-1, 0o777),
)
def test_packed_request_is_unpacked_unchanged(
    keys: list[bytes], shard: str, size: int, number: int, mode: int
) -> None:
    request = LeaseRequest(ROOT, keys, shard, size, number, mode)
    packed = leasing.pack_request(request)
    assert leasing.is_question(packed)
    assert leasing.unpack_request(packed) == request


@given(st.lists(NUMBERS, max_size=100), st.integers(0, (1 << 31) - 1), st.integers(0, 64), NUMBERS)
def test_the_others_are_read_back(leases: list[int], number: int, blocks: int, first: int) -> None:
    for question in (leasing.CLOSE, leasing.DONE):
        packed = leasing.pack_close(leases, question)
        assert leasing.is_question(packed)
        assert leasing.unpack_close(packed) == tuple(leases)
    assert leasing.unpack_socket(leasing.pack_socket(number)) == number
    answer = leasing.LeaseAnswer(number, blocks, first)
    for question in (leasing.OPEN, leasing.MAKE):
        assert leasing.unpack_answer(leasing.pack_answer(answer, question)) == answer


@given(st.binary(max_size=200))
def test_any_bytes_are_a_question_or_refused(data: bytes) -> None:
    for magic, unpack in (
        (leasing.OPEN, leasing.unpack_request),
        (leasing.MAKE, leasing.unpack_request),
        (leasing.DONE, leasing.unpack_close),
        (leasing.CLOSE, leasing.unpack_close),
        (leasing.SOCKET, leasing.unpack_socket),
    ):
        for bad in (data, magic + data):
            try:
                unpack(bad)
            except InvalidError:
                continue


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"KVO1", "request of 4 bytes, expected 28 at least"),
        (struct.pack("<4sIIQQ", b"KVO1", 65, 0, 0, 0), "65 keys, at most 64 in a question"),
        (
            leasing.pack_request(LeaseRequest(ROOT, KEYS[:1], "", 1))[:-1],
            "of 59 bytes, expected 60",
        ),
        (leasing.MAKE, "request of 4 bytes, expected 32 at least"),
        (
            leasing.pack_request(LeaseRequest(ROOT, [], "", 1, 0, 0o1000)),
            "mode 0o1000, expected",
        ),
        (struct.pack("<4sIIQQ", b"KVO1", 0, 1, 0, 0) + b"/" + ROOT, "shard: shard='/'"),
        (struct.pack("<4sIIQQ", b"KVO1", 0, 1, 0, 0) + b"\xff" + ROOT, "shard: 'ascii' codec"),
    ],
)
def test_questions_that_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidError) as caught:
        leasing.unpack_request(data)
    assert words in str(caught.value)


def test_too_much_to_be_asked() -> None:
    with pytest.raises(ValueError, match="65 keys, at most 64 in a question"):
        leasing.pack_request(LeaseRequest(ROOT, KEYS, "", 1))
    with pytest.raises(ValueError, match="4097 leases, at most 4096"):
        leasing.pack_close(range(4097))
    with pytest.raises(InvalidError, match="descriptor -1, expected at least 0"):
        leasing.unpack_socket(leasing.pack_socket(-1))
    with pytest.raises(ValueError, match="expected an answer, which begins with b'KVO1'"):
        leasing.unpack_answer(leasing.pack_close([]) + bytes(16))


def test_the_examples_of_the_specification() -> None:
    """docs/prefix-paths.md has them."""
    text = (HERE.parents[1] / "docs" / "prefix-paths.md").read_text()
    written = [block.replace(" ", "").replace("\n", "") for block in text.split("```")[1::2]]
    vectors = json.loads((HERE / "prefix_vectors.json").read_text())
    asked = vectors["match"]["requests"][0]
    parent, *keys = map(bytes.fromhex, [asked["parent"], *asked["keys"]])
    for packed in (
        leasing.pack_socket(7),
        leasing.pack_request(LeaseRequest(parent, keys, "", 8 << 20, 1)),
        leasing.pack_answer(leasing.LeaseAnswer(1, 2, 7)),
        leasing.pack_close([7, 8]),
        leasing.pack_request(LeaseRequest(parent, keys, "", 8 << 20, 2, 0o644)),
        leasing.pack_answer(leasing.LeaseAnswer(2, 2, 9), leasing.MAKE),
        leasing.pack_close([9, 10], leasing.DONE),
    ):
        assert f"text{packed.hex()}" in written
