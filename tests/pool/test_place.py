"""The place of a pool: all forms of its URL, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.pool.place import EXPECTED, HOSTS_MOST, PoolPlace

FORMS = {
    "redis://h/kv": PoolPlace("single", tls=False, hosts=(("h", 6379),), name="kv"),
    "rediss://10.0.0.1:1/a.B_c-9": PoolPlace(
        "single", tls=True, hosts=(("10.0.0.1", 1),), name="a.B_c-9"
    ),
    "redis://[::1]:65535/kv": PoolPlace("single", tls=False, hosts=(("::1", 65535),), name="kv"),
    "redis+sentinel://a,b:7/main/kv": PoolPlace(
        "sentinel", tls=False, hosts=(("a", 26379), ("b", 7)), name="kv", service="main"
    ),
    "rediss+sentinel://a/main/kv": PoolPlace(
        "sentinel", tls=True, hosts=(("a", 26379),), name="kv", service="main"
    ),
    "redis+cluster://a:1,[fe80::1],c/kv": PoolPlace(
        "cluster", tls=False, hosts=(("a", 1), ("fe80::1", 6379), ("c", 6379)), name="kv"
    ),
}


@pytest.mark.parametrize(("url", "place"), FORMS.items())
def test_each_form_is_read(url: str, place: PoolPlace) -> None:
    assert PoolPlace.parse(url) == place
    assert PoolPlace.parse(str(place)) == place


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", EXPECTED),
        ("h:6379/kv", EXPECTED),
        ("http://h/kv", EXPECTED),
        ("redis+other://h/kv", EXPECTED),
        ("redis://h", EXPECTED),
        ("redis://h/main/kv", EXPECTED),
        ("redis+cluster://h/main/kv", EXPECTED),
        ("redis+sentinel://h/kv", EXPECTED),
        ("redis+sentinel://h//kv", EXPECTED),
        ("redis+sentinel://h/a b/kv", EXPECTED),
        ("redis://h/kv\n", EXPECTED),
        ("redis://h/", "a NAME of 1 to 64"),
        ("redis://h/.", "a NAME of 1 to 64"),
        ("redis://h/..", "a NAME of 1 to 64"),
        ("redis://a..b/kv", "HOST:PORT, with a name"),
        (f"redis://{'a' * 64}/kv", "HOST:PORT, with a name"),
        (f"redis://{'a.' * 150}a/kv", "HOST:PORT, with a name"),
        ("redis://h/a?db=1", "a NAME of 1 to 64"),
        ("redis://h/" + "a" * 65, "a NAME of 1 to 64"),
        ("redis:///kv", "HOST:PORT"),
        ("redis://h:0/kv", "HOST:PORT"),
        ("redis://h:65536/kv", "HOST:PORT"),
        ("redis://h:/kv", "HOST:PORT"),
        ("redis://::1/kv", "HOST:PORT"),
        ("redis://[::1::]/kv", "HOST:PORT"),
        ("redis://[::1/kv", "HOST:PORT"),
        ("redis://../kv", "HOST:PORT"),
        ("redis+cluster://a,/kv", "HOST:PORT"),
        ("redis://a,b/kv", "one HOST:PORT"),
        ("redis+cluster://" + ",".join("a" * (HOSTS_MOST + 1)) + "/kv", "up to 16"),
    ],
)
def test_other_urls_are_refused(url: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        PoolPlace.parse(url)


@pytest.mark.parametrize("url", ["redis://user:secret@h/kv", "rediss://:secret@h:1/kv"])
def test_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="pool_credentials=FILE") as refused:
        PoolPlace.parse(url)
    assert "secret" not in str(refused.value)


NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
HOSTS = st.one_of(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,20}", fullmatch=True),
    st.ip_addresses().map(str),
)
ADDRESSES = st.tuples(HOSTS, st.integers(1, 65535))


@st.composite
def places(draw: st.DrawFn) -> PoolPlace:
    kind = draw(st.sampled_from(["single", "sentinel", "cluster"]))
    most = 1 if kind == "single" else HOSTS_MOST
    hosts = draw(st.lists(ADDRESSES, min_size=1, max_size=most))
    service = draw(NAMES) if kind == "sentinel" else ""
    return PoolPlace(kind, draw(st.booleans()), tuple(hosts), draw(NAMES), service)  # type: ignore[arg-type]


@given(places())
def test_text_of_a_place_is_its_url(place: PoolPlace) -> None:
    assert PoolPlace.parse(str(place)) == place


@given(st.text() | st.text(alphabet="redis+clunt:/,.[]@0123456789\n"))
def test_any_other_text_is_a_value_error(text: str) -> None:
    try:
        place = PoolPlace.parse(text)
    except ValueError:
        return
    assert PoolPlace.parse(str(place)) == place
