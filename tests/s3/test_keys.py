"""Keys: every name has one, and only keys of kvfs are parsed as such."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.s3.errors import MetadataError
from kvfs.s3.keys import KEY_MAX, Keys, ObjectName, escape, unescape

PREFIXES = ["", "kv/", "a/b-c/"]
HOSTILE = [
    *(b".", b"..", b"...", b"", b" ", b"a ", b" a", b"%", b"%2E", b"%00", b"%41", b"@", b"a@1"),
    *(
        b"\xff\xfe",
        b"\x01\x1f\x7f",
        "é€😀".encode(),
        b"a\nb",
        b"?#&+",
        b'"<>\\',
        b"s3://x",
        b"\xc3",
    ),
    *(b"CON", b"a:b;c", b"x" * 255, b"\xff" * 255, b".kvfs", b"con.", b"~", b"*"),
]

parts = st.one_of(
    st.sampled_from(HOSTILE),
    st.binary(max_size=255).map(lambda data: data.replace(b"\0", b"").replace(b"/", b"")),
)
names = st.builds(
    ObjectName,
    parts,
    st.integers(0, 10**18),
    st.lists(parts, min_size=1, max_size=20).map(b"/".join),
)
anything = st.one_of(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60),
    st.text(alphabet="a@%/.0125EFef", max_size=30),
)


@given(names, st.sampled_from(PREFIXES))
def test_every_name_comes_back(name: ObjectName, prefix: str) -> None:
    keys = Keys(prefix)
    key = keys.of(name)
    assert len(key) <= KEY_MAX
    assert re.fullmatch(r"[!-~]+", key)
    assert "//" not in key
    assert not {".", ".."} & set(key.split("/"))
    record = keys.record(name)
    if record is None:
        assert keys.parse(key) == name
        assert keys.record_of(key) == ""
    else:
        assert keys.parse(key) is None
        assert keys.record_of(key) == record[0]
        assert keys.parse_record(*record) == name
        assert len(record[0]) <= KEY_MAX


@given(names, names)
def test_two_names_have_two_keys(one: ObjectName, other: ObjectName) -> None:
    keys = Keys("p/")
    assert (keys.of(one) == keys.of(other)) == (one == other)


@given(anything)
def test_parsed_keys_are_written_unchanged(text: str) -> None:
    for prefix in ("", "p/"):
        name = Keys(prefix).parse(prefix + text)
        assert name is None or Keys(prefix).of(name) == prefix + text


@given(st.binary(max_size=300))
def test_escapes(data: bytes) -> None:
    if b"\0" not in data:
        assert unescape(escape(data)) == data


@given(names, parts)
def test_directory_is_the_start_of_its_keys(name: ObjectName, last: bytes) -> None:
    keys = Keys("p/")
    within = name._replace(path=name.path + b"/" + last)
    if keys.record(within) is None:
        assert keys.of(within).startswith(keys.folder(name.namespace, name.version, name.path))
        assert keys.of(within).startswith(keys.folder(name.namespace, name.version))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (
            ObjectName(b"lmcache", 1, b"llama-8b/model@0@ab.pt"),
            "kv/lmcache@1/llama-8b/model@0@ab.pt",
        ),
        (ObjectName(b"", 0, b"file"), "kv/@0/file"),
        (ObjectName(b"a@b", 12, b"x y/.."), "kv/a%40b@12/x%20y/%2E%2E"),
        (ObjectName(b"n", 3, "é".encode()), "kv/n@3/%C3%A9"),
    ],
)
def test_people_can_read_keys(name: ObjectName, key: str) -> None:
    """The format's examples: if they change, it is another format."""
    assert Keys("kv/").of(name) == key


def test_a_long_name_has_a_hash() -> None:
    name = ObjectName(b"n", 1, b"/".join([b"d" * 200] * 20))
    digest = "2b46c321db61c49f8bf00ab44f32619c8376183b812aa2b2ce13703cd5086ae3"
    assert Keys("kv/").of(name) == f"kv/%/{digest}"


@pytest.mark.parametrize(
    "key",
    [
        *("kv/", "kv/a", "kv/a@1", "kv/a@1/", "kv/a@01/b", "kv/a@-1/b", "kv/@/b", "kv/a@1/%41"),
        *("kv/a@1/%2e%2e", "kv/a@1/..", "kv/a@1//b", "kv/a@1/b/", "kv/a@1/%", "kv/a@1/%G0"),
        *("kv/a@1/a b", "kv/a@1/é", "other/a@1/b", "kv/.kvfs/format.json", "kv/%/abc", "kv/a@1/ "),
        *("kv/a%@1/b", "kv/a@1/%00%00", "kv/a@1/" + "x" * KEY_MAX, "kv/a@9999999999999999999999/b"),
    ],
)
def test_foreign_key_is_parsed_as_none(key: str) -> None:
    assert Keys("kv/").parse(key) is None
    assert Keys("kv/").record_of(key) == ""


@pytest.mark.parametrize("content", [b"", b"n@1/other", b"\xff", b"n@1/%41", b"x" * 5000])
def test_a_record_that_lies(content: bytes) -> None:
    keys = Keys("kv/")
    record = keys.record(ObjectName(b"n", 1, b"y" * 2000))
    assert record is not None
    with pytest.raises(MetadataError, match=r"kv/\.kvfs/names/"):
        keys.parse_record(record[0], content)
