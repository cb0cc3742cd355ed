"""Any text for the name of a block's file."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.prefix import check_shard, name, parse
from tests.unit.fuzz import answers_in_time, fuzzed, long_ones, spoiled

KEY = "0123456789abcdef" * 2
NAMES = (KEY, f"{KEY}.0", f"{KEY}.tp1-pp0", f"{KEY}.7f3a.tmp", f"{KEY}.0.7f3a.tmp", f"{KEY}.tmp")


@fuzzed
@given(spoiled(NAMES))
def test_a_name_is_written_in_one_way(text: str) -> None:
    """What is read is written the same again; a temporary name continues that of its block."""
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


def test_no_name_takes_for_ever() -> None:
    answers_in_time(parse)
    answers_in_time(check_shard, ValueError)
    for text in long_ones(f"{KEY}.", ".tmp"):
        parse(text)
