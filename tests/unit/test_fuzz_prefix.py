"""Any text for the name of a block's file, any bytes for a question about blocks."""

from collections.abc import Callable
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from kvfs import leasing, matching
from kvfs.errors import InvalidError
from kvfs.prefix import check_shard, name, parse
from tests.unit.fuzz import answers_in_time, fuzzed, long_ones, spoiled, spoiled_bytes

KEY = "0123456789abcdef" * 2
NAMES = (KEY, f"{KEY}.0", f"{KEY}.tp1-pp0", f"{KEY}.7f3a.tmp", f"{KEY}.0.7f3a.tmp", f"{KEY}.tmp")


@fuzzed
@given(spoiled(NAMES))
def test_a_name_is_written_in_one_way(text: str) -> None:
    """A parsed name is written the same again. A temporary name begins with its block's name."""
    found = parse(text)
    if found is None:
        return
    again = name(found.key, found.shard)
    if found.temporary:
        assert text.startswith(f"{again}.")
        assert text.endswith(".tmp")
        assert text.count(".") == again.count(".") + 2
    else:
        assert text == again
    assert text.isascii()
    assert "/" not in text


@fuzzed
@given(st.binary(min_size=16, max_size=16), spoiled(["0", "tp1-pp0", "tmp", "TMP", "-", "_"]))
def test_a_shard_is_read_as_it_was_written(key: bytes, shard: str) -> None:
    try:
        check_shard(shard)
    except ValueError:
        return
    assert parse(name(key, shard)) == (key, shard, False)


KEYS = [bytes([at]) * 16 for at in range(1, 5)]
QUESTIONS = (
    leasing.pack_request(leasing.LeaseRequest(KEYS[0], KEYS[1:], "tp1-pp0", 8 << 20)),
    leasing.pack_request(leasing.LeaseRequest(KEYS[0], [], "", 0)),
    leasing.pack_request(leasing.LeaseRequest(KEYS[0], KEYS[1:], "", 8 << 20, mode=0o644)),
    leasing.pack_close([1, 2, 1 << 63]),
    leasing.pack_close([1, 2], leasing.DONE),
    leasing.pack_socket(7),
    matching.pack_request(KEYS[0], KEYS[1:], ["0", "1"], details=True),
)


@fuzzed
@given(spoiled_bytes(QUESTIONS))
def test_unpacked_question_is_packed_unchanged(data: bytes) -> None:
    written_again: tuple[Callable[[], bytes], ...] = (
        lambda: leasing.pack_request(leasing.unpack_request(data)),
        lambda: leasing.pack_close(leasing.unpack_close(data)),
        lambda: leasing.pack_socket(leasing.unpack_socket(data)),
    )
    for again in written_again:
        with suppress(InvalidError):
            assert again()[4:] == data[4:]
    with suppress(InvalidError):
        matching.unpack_request(data)
        assert len(data) == matching.request_size(data)


def test_no_name_takes_for_ever() -> None:
    answers_in_time(parse)
    answers_in_time(check_shard, ValueError)
    for text in long_ones(f"{KEY}.", ".tmp"):
        parse(text)
