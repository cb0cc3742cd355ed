"""The settings of a namespace: what is understood, what is refused, and with which words."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.parsing import rows
from kvfs.settings import EVICTIONS, MEDIA, Settings
from kvfs.templates import Templates
from kvfs.units import LONGEST_DURATION, format_duration, parse_duration

SIZE = st.integers(0, (1 << 62) - 1)
OWNER = st.none() | st.integers(0, (1 << 32) - 2)


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    hard = draw(SIZE)
    pin = draw(st.booleans())
    ttl = 0 if pin else draw(st.integers(0, LONGEST_DURATION))
    media = draw(st.sets(st.sampled_from(MEDIA)))
    through = media != {"ram"} and draw(st.booleans())
    fingerprint = draw(st.text(max_size=512)).encode(errors="ignore").decode()
    return Settings(
        media=tuple(medium for medium in MEDIA if medium in media),
        eviction=draw(st.sampled_from([name for name in EVICTIONS if ttl or name != "ttl"])),
        quota_soft=draw(st.integers(0, hard) if hard else SIZE),
        quota_hard=hard,
        quota_objects=draw(st.integers(0, 10**12)),
        ttl=ttl,
        ttl_from=draw(st.sampled_from(["write", "use"])),
        pin=pin,
        weight=draw(st.integers(1, 1000)),
        read_iops=draw(st.integers(0, 10**9)),
        write_iops=draw(st.integers(0, 10**9)),
        read_bytes=draw(SIZE),
        write_bytes=draw(SIZE),
        priority=draw(st.sampled_from(["normal", "bulk"])),
        write="through" if through else "back",
        compression=draw(st.sampled_from(["off", "s3"])),
        publish=draw(st.sampled_from(["immediate", "close"])),
        uid=draw(OWNER),
        gid=draw(OWNER),
        mode=draw(st.none() | st.integers(0, 0o777)),
        fingerprint="".join(c for c in fingerprint if c.isprintable())[:63],
        version=draw(st.integers(1, 1 << 31)),
    )


# Accepted settings


@given(any_settings())
def test_settings_survive_the_way_to_text_and_to_json(settings: Settings) -> None:
    assert Settings.parse(settings.to_text()) == settings
    assert Settings.from_json(settings.to_json()) == settings


def test_none_means_no_owner_and_no_mode() -> None:
    """As the table of settings says it."""
    nobody = {"uid": "none", "gid": "none", "mode": "none"}
    assert Settings(uid=1, gid=1, mode=0o600).changed(nobody) == Settings()


def test_a_catalog_that_has_bytes_without_a_unit_is_read() -> None:
    written = '{"quota_hard": "500", "read_bytes": "300", "weight": "7"}'
    assert Settings.from_json(written) == Settings(quota_hard=500, read_bytes=300, weight=7)


def test_every_setting_is_understood() -> None:
    settings = Settings.parse(
        {
            "media": "nvme+ram",
            "eviction": "s3fifo",
            "quota_soft": "1G",
            "quota_hard": "1.5G",
            "quota_objects": "1000",
            "ttl": "12h",
            "ttl_from": "use",
            "pin": "off",
            "weight": "300",
            "read_iops": "10",
            "write_iops": "20",
            "read_bytes": "10M",
            "write_bytes": "20MiB",
            "priority": "bulk",
            "write": "through",
            "compression": "s3",
            "publish": "close",
            "uid": "1000",
            "gid": "0",
            "mode": "600",
            "fingerprint": "llama-3.1-8b bf16",
            "version": "2147483648",
        }
    )
    assert settings == Settings(
        media=("ram", "nvme"),
        eviction="s3fifo",
        quota_soft=1 << 30,
        quota_hard=3 << 29,
        quota_objects=1000,
        ttl=12 * 3600,
        ttl_from="use",
        weight=300,
        read_iops=10,
        write_iops=20,
        read_bytes=10 << 20,
        write_bytes=20 << 20,
        priority="bulk",
        write="through",
        compression="s3",
        publish="close",
        uid=1000,
        gid=0,
        mode=0o600,
        fingerprint="llama-3.1-8b bf16",
        version=1 << 31,
    )


def test_empty_owner_and_mode_override_nothing() -> None:
    settings = Settings.parse({"uid": "", "gid": "", "mode": "", "media": "all"})
    assert settings == Settings()
    assert settings.to_text()["mode"] == ""
    assert Settings(mode=0o60, media=("ram", "s3")).to_text()["mode"] == "0060"
    assert Settings(media=("ram", "s3")).to_text()["media"] == "ram+s3"


def test_a_change_keeps_the_rest_and_the_original() -> None:
    before = Settings.parse({"weight": "7", "ttl": "1d"})
    after = before.changed({"ttl": "0", "pin": "on"})
    assert (after.weight, after.ttl, after.pin) == (7, 0, True)
    assert (before.ttl, before.pin) == (86400, False)


def test_settings_of_an_older_version_get_defaults() -> None:
    texts = json.loads(Settings(weight=3).to_json())
    del texts["publish"]
    assert Settings.from_json(json.dumps(texts)) == Settings(weight=3)


@pytest.mark.parametrize("text", ["[]", '{"weight": 3}', '{"frobnicate": "1"}'])
def test_settings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected texts by name|unknown setting 'frobnicate'"):
        Settings.from_json(text)


def test_every_setting_is_described() -> None:
    described = {row.name: row for row in rows(Settings)}
    assert described.keys() == Settings().to_text().keys()
    assert all(row.unit and row.default and row.meaning for row in described.values())
    assert described["media"].default == "all"
    assert described["uid"].default == "none"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0s", 0), ("30s", 30), ("10m", 600), ("12h", 43200), ("7d", 604800)],
)
def test_durations_have_units(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1.5h", "1 h", "1w", "1e3", "36501d", "٣s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration(text)


@given(st.integers(0, LONGEST_DURATION))
def test_a_formatted_duration_is_the_same_duration(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


# Refusals


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("wieght", "1", "unknown setting 'wieght'; did you mean weight"),
        ("frobnicate", "1", "unknown setting 'frobnicate'; there are media, eviction"),
        ("media", "", "setting media=: expected all, or some of ram, nvme, s3 joined by +"),
        ("media", "ram+tape", "setting media=ram+tape: expected all"),
        ("media", "ram+ram", "expected all, or some of"),
        ("media", "ram+all", "expected all, or some of"),
        ("eviction", "mru", "setting eviction=mru: expected one of adaptive, lru, lfu"),
        ("quota_hard", "lots", "setting quota_hard=lots: expected a size"),
        ("quota_objects", "-1", "a whole number from 0"),
        ("ttl", "soon", "setting ttl=soon: expected a duration such as 30s"),
        ("ttl_from", "read", "one of write, use"),
        ("pin", "true", "on or off"),
        ("weight", "0", "setting weight=0: expected a whole number from 1 to 1000"),
        ("weight", "1001", "a whole number from 1 to 1000"),
        ("weight", "1\n", "a whole number from 1 to 1000"),
        ("read_iops", "1k", "a whole number from 0"),
        ("priority", "high", "one of normal, bulk"),
        ("write", "around", "one of back, through"),
        ("publish", "never", "one of immediate, close"),
        ("uid", "root", "a whole number from 0 to 4294967294"),
        ("gid", "4294967295", "a whole number from 0 to 4294967294"),
        ("mode", "1777", "setting mode=1777: expected an octal mode from 0 to 0777"),
        ("mode", "08", "an octal mode"),
        ("mode", "0o", "an octal mode"),
        ("fingerprint", "a\nb", "one line of printable text, at most 2048 bytes"),
        ("fingerprint", "ä" * 1025, "at most 2048 bytes"),
        ("fingerprint", "\udcff", "printable text"),
        ("version", "0", "a whole number from 1 to 2147483648"),
        ("version", "2147483649", "a whole number from 1 to 2147483648"),
    ],
)
def test_a_bad_setting_is_refused_by_name_value_and_expectation(
    name: str, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.parse({name: text})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"quota_soft": "2G", "quota_hard": "1G"}, "quota_soft=2G contradicts quota_hard=1G"),
        ({"eviction": "ttl"}, "eviction=ttl contradicts ttl=0: give a ttl"),
        ({"pin": "on", "ttl": "1h"}, "pin=on contradicts ttl=1h"),
        ({"write": "through", "media": "ram"}, "write=through contradicts media=ram"),
    ],
)
def test_contradictions_are_refused_with_their_cure(texts: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.parse(texts)
    assert words in str(refusal.value)


def test_change_that_contradicts_a_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="quota_soft=2G contradicts quota_hard=1G"):
        Settings.parse({"quota_hard": "1G"}).changed({"quota_soft": "2G"})


def test_a_soft_quota_needs_no_hard_one() -> None:
    assert Settings.parse({"quota_soft": "2G"}).quota_soft == 2 << 30


# Templates


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvfs.toml"


def test_the_first_pattern_that_matches_wins(file: Path) -> None:
    file.write_text(
        """
        [namespace."vllm-*"]
        weight = 300
        pin = true
        [namespace.weights]
        priority = "bulk"
        mode = "0644"
        [namespace."*"]
        ttl = "7d"
        pin = false
        """
    )
    templates = Templates.read(file)
    assert templates.for_name("vllm-a") == Settings(weight=300, pin=True)
    assert templates.for_name("weights") == Settings(priority="bulk", mode=0o644)
    assert templates.for_name("VLLM-a") == Settings(ttl=7 * 86400)


def test_a_pattern_may_have_whatever_a_name_may(file: Path) -> None:
    patterns = ["*", "[abc]?", "[]a]x", "[!]]", ".*", "a]", "a b"]
    file.write_text("".join(f"[namespace.'{one}']\n" for one in patterns))
    assert [pattern for pattern, _ in Templates.read(file).by_pattern] == patterns


def test_a_tier_that_is_not_mounted_is_refused(file: Path) -> None:
    file.write_text("[namespace.a]\nmedia = 'ram'")
    assert Templates.read(file, ["ram", "nvme"]).for_name("a") == Settings(media=("ram",))
    with pytest.raises(
        ConfigError, match=r'\[namespace."a"\]: setting media=ram: this mount has no'
    ):
        Templates.read(file, ["nvme"])


def test_without_a_match_there_is_nothing(file: Path) -> None:
    file.write_text("")
    assert Templates.read(file) == Templates()
    assert Templates().for_name("any") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[namespace.a]\nweight = 0", '[namespace."a"]: setting weight=0: expected a whole number'),
        ("[namespace.a]\nwieght = 1", "[namespace.\"a\"]: unknown setting 'wieght'; did you mean"),
        ("[namespace.a]\nttl = 1.5", "setting ttl=1.5: expected a text"),
        ("[namespace.a]\nmode = 0o600", 'setting mode=384: expected a text such as "0600"'),
        ("[namespace.llama.v3]\nweight = 1", "a pattern with a dot needs quotes"),
        ('[namespace.a]\neviction = "ttl"', '[namespace."a"]: setting eviction=ttl contradicts'),
        ("[namespaces.a]\nweight = 1", "unknown table 'namespaces'; did you mean namespace?"),
        ("namespace = 1", "namespace = 1: expected tables"),
        ("[namespace]\na = 1", '[namespace."a"]: expected a table, found 1'),
        ("[namespace.a\n", "line 1"),
        *(
            (f"[namespace.'{pattern}']", "expected a pattern for the names of top-level")
            for pattern in ("", ".", "..", "a/*", "a[bc", "[]", "[!]a")
        ),
    ],
)
def test_a_bad_template_is_refused_by_file_table_field_and_value(
    file: Path, text: str, words: str
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        Templates.read(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert words in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Templates.read(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="utf-8"):
        Templates.read(file)
