"""Any text for an option, a setting, an address or a file of settings: a value, or ConfigError."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs import failpoints, runtime
from kvfs.cli import assignments
from kvfs.config import Config, bucket_place, parse_hot
from kvfs.errors import ConfigError
from kvfs.metrics.address import Address
from kvfs.parsing import rows
from kvfs.s3.place import BucketPlace
from kvfs.settings import Settings
from kvfs.templates import Templates
from kvfs.units import parse_duration, parse_size
from tests.unit.fuzz import answers_in_time, fuzzed, spoiled, spoiled_bytes

HERE = Path("/mnt/kv")
NEST = "[" * 3000  # more than Python has stack for
OPTIONS = (
    "ram=64M,nvme=/tmp,nvme_size=1G,s3=s3://bucket/p,s3_endpoint=http://[::1]:9000,s3_dirty=25%",
    "ram=0,nvme=/tmp,s3_delay=0.5,huge=never,passthrough=off,allow_other,movers=4,reclaimable=25%",
    "ro,nosuid,log=/tmp/a\\,b,metrics=[::1]:9095,x-systemd.automount,namespaces=/tmp/n,nofail",
    "metrics=/run/kvfs.sock,s3=s3://bucket,s3_profile=me,bandwidth=1G,entry_timeout=1,log_level=debug",
)
NAMES = [row.name for row in rows(Config)]
SETTINGS = (
    {"quota_hard": "10G", "ttl": "7d", "eviction": "lru", "media": "ram+nvme", "mode": "0600"},
    {"uid": "1000", "gid": "none", "weight": "100", "fingerprint": "llama", "publish": "close"},
)
TOML = (
    '[namespace."a*"]\nquota_hard = "1G"\nmode = "0600"\n[namespace.b]\npin = true\nweight = 7\n',
    '[namespace."[a-z]?"]\nttl = "7d"\nttl_from = "use"\n',
)


@fuzzed
@given(spoiled(OPTIONS), spoiled(OPTIONS))
@example("ram=64M", f"log=/{'x' * 300}")
def test_options(options: str, later: str) -> None:
    """Accepted options are accepted again as they are shown, and survive JSON."""
    try:
        config = Config.from_options(HERE, options)
    except ConfigError:
        return
    assert Config.from_json(config.to_json()) == config
    told = [f"{name}={text}" if text else name for name, text in config.as_options().items()]
    again = Config.from_options(HERE, ",".join(told))
    assert again.as_options() == config.as_options()
    try:
        config.upgraded(later)
    except ConfigError:
        return


@fuzzed
@given(st.sampled_from(NAMES), spoiled(["1", "16M", "25%", "on", "30", "s3://b/p", "/a", "debug"]))
def test_options_of_a_mount_that_runs(name: str, text: str) -> None:
    try:
        parse_hot(name, text)
    except ConfigError:
        return


@fuzzed
@given(spoiled(OPTIONS))
def test_any_bucket_options_are_a_place_or_refused(options: str) -> None:
    try:
        bucket_place(options)
    except ConfigError:
        return


RIGHT_JSON = Config.from_options(HERE, OPTIONS[0]).to_json()


@fuzzed
@given(spoiled([RIGHT_JSON, "{}", '{"mountpoint": "/mnt/kv"}']))
@example(NEST)
@example('{"mountpoint": "/mnt/kv", "nvme": 5}')
@example('{"mountpoint": "/mnt/kv", "mount_flags": 5}')
def test_a_configuration_as_json(text: str) -> None:
    try:
        Config.from_json(text)
    except ConfigError:
        return


@fuzzed
@given(st.sampled_from(SETTINGS), st.data())
def test_settings(right: dict[str, str], data: st.DataObject) -> None:
    name = data.draw(spoiled(list(right)))
    texts = {**right, name: data.draw(spoiled(list(right.values())))}
    try:
        found = Settings.parse(texts)
    except ConfigError:
        return
    assert Settings.parse(found.to_text()) == found
    assert Settings.from_json(found.to_json()) == found


@fuzzed
@given(spoiled([Settings().to_json(), *map(str, SETTINGS), "{}"]))
@example(NEST)
def test_settings_as_the_catalog_has_them(text: str) -> None:
    try:
        Settings.from_json(text)
    except ConfigError:
        return


@fuzzed
@given(spoiled_bytes(TOML), st.text(max_size=20))
@example(b"a = " + NEST.encode(), "a")
def test_templates(tmp_path: Path, text: bytes, name: str) -> None:
    path = tmp_path / "templates"
    path.write_bytes(text)
    try:
        found = Templates.read(path)
    except ConfigError:
        return
    found.for_name(name)


@fuzzed
@given(spoiled(["s3://bucket/a/b", "s3://bucket", "s3://b.c-d/x=1"]), spoiled(["http://h:1/", ""]))
def test_a_place(url: str, endpoint: str) -> None:
    """No name in it can mean another place, in a URL or a header."""
    try:
        place = BucketPlace.parse(url, endpoint=endpoint)
    except ValueError:
        return
    assert BucketPlace.parse(str(place), endpoint=endpoint) == place
    told = str(place) + str(place.endpoint)
    assert told.isascii()
    assert told.isprintable()
    assert not set(" @?#%\\") & set(told)


@fuzzed
@given(spoiled(["9095", "127.0.0.1:9095", "[::1]:1", "localhost:80", "/run/kvfs.sock"]))
def test_an_address(text: str) -> None:
    try:
        found = Address.parse(text)
    except ValueError:
        return
    assert Address.parse(str(found)) == found


@fuzzed
@given(spoiled(["1.5T", "16MiB", "0", "7d", "100", "9999999999d"]))
def test_units(text: str) -> None:
    for parse in (parse_size, parse_duration):
        try:
            assert parse(text) >= 0
        except ValueError:
            continue


@fuzzed
@given(st.lists(spoiled(["a=b", "quota_hard=1G"]), max_size=3))
def test_assignments(words: list[str]) -> None:
    try:
        assignments(words, "setting")
    except ConfigError:
        return


@fuzzed
@given(spoiled(["catalog.commit=kill@3;tiers.create=raise:ENOSPC@1", "tiers.open=delay:0.5"]))
@example("tiers.open=kill@\u00b2")
@example("tiers.open=delay:.")
@example("tiers.open=kill@" + "9" * 5000)
def test_fail_points(text: str) -> None:
    try:
        failpoints.arm(text)
    except ConfigError:
        return
    finally:
        failpoints.arm("")


@fuzzed
@given(st.lists(st.binary(min_size=1, max_size=50).filter(lambda name: b"\0" not in name)))
@example(["\u2028".encode(), b"\x0b\x0c\x1c\x85", b" - ", b"#\\040"])
def test_tables_of_mounts(tmp_path: Path, names: list[bytes]) -> None:
    """Any user may mount on a directory of any name; the kernel escapes four bytes of names."""
    (tmp_path / "self").mkdir(exist_ok=True)
    lines = [
        b"22 1 0:2 / /%b rw - fuse.kvfs kvfs rw,user_id=0\n" % _escaped(name) for name in names
    ]
    (tmp_path / "self/mountinfo").write_bytes(b"".join(lines))
    found = [os.fsencode(mount.path) for mount in runtime.mounts(tmp_path)]
    assert found == [b"/" + name for name in names]


def _escaped(name: bytes) -> bytes:
    """As show_mountinfo() of Linux does it."""
    return re.sub(rb"[ \t\n\\]", lambda hit: b"\\%03o" % hit[0][0], name)


@fuzzed
@given(st.binary(min_size=1, max_size=300).filter(lambda path: b"\0" not in path))
def test_a_name_for_any_mount_point(path: bytes) -> None:
    found = runtime.escape(Path(os.fsdecode(b"/" + path)))
    assert found.isascii()
    assert found.isprintable()
    assert "/" not in found
    assert found not in {"", ".", ".."}


def _options_of(begin: str) -> Callable[[str], object]:
    return lambda text: Config.from_options(HERE, begin + text)


@pytest.mark.parametrize(
    "parse",
    [
        *map(_options_of, ("", "s3=s3://", "s3_endpoint=http://", "metrics=", "nvme=/", "log=/")),
        *(Config.from_json, Settings.from_json, parse_size, parse_duration, Address.parse),
        *(BucketPlace.parse, failpoints.arm, lambda text: assignments([text], "setting")),
    ],
)
def test_no_input_takes_for_ever(parse: Callable[[str], object]) -> None:
    answers_in_time(parse, ConfigError, ValueError)
