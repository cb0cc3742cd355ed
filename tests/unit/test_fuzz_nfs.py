"""Any text for an export: a configuration that says what was asked for, or ConfigError."""

import re
from pathlib import Path
from uuid import UUID

from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.nfs.export import Export, NfsServer, networks, owner
from tests.unit.fuzz import answers_in_time, fuzzed, spoiled

FSID = UUID(int=7)
PATHS = ("/mnt/kv", '/mnt/k"v', "/mnt/{k};v", "/mnt/k v(rw,no_root_squash)", "/mnt/#k$v\u2028")


@fuzzed
@given(spoiled(["10.0.0.0/8", "fd00::/8", "192.0.2.7", "::/0", "fe80::1%eth0"]))
@example("fe80::1%x(rw,no_root_squash) *(rw")
@example("fe80::%x;}\n/128")
def test_networks(text: str) -> None:
    """No address brings anything else along, as the zone of one can."""
    try:
        found = networks("--allow", [text])
    except ConfigError:
        return
    assert re.fullmatch(r"[0-9a-f.:]+/[0-9]+", str(found[0]))
    line = Export(Path("/mnt/kv"), FSID, found).line()
    assert line.count("(") == line.count("root_squash") == 1


@fuzzed
@given(spoiled(["1000:1000", "0:0", "4294967294:1"]))
def test_owners(text: str) -> None:
    try:
        found = owner("--all-as", text)
    except ConfigError:
        return
    assert all(0 <= number < (1 << 32) - 1 for number in found)


@fuzzed
@given(spoiled(PATHS).map(lambda text: Path("/" + text.replace("\0", ""))), st.booleans())
def test_paths(path: Path, v3: bool) -> None:  # noqa: FBT001 (drawn)
    """A mount point with any name stays between its quotes."""
    allow = networks("--allow", ["127.0.0.0/8"])
    plain = Export(Path("/mnt/kv"), FSID, allow)
    server = NfsServer("127.0.0.1", 2049, 20048 if v3 else 0, Path("/run/kvfs/x"))
    try:
        export = Export(path, FSID, allow)
    except ConfigError:
        return
    assert export.line().replace(f'"{path}"', '"/mnt/kv"') == plain.line()
    told = export.ganesha(server)
    assert told.count("\n") == plain.ganesha(server).count("\n")
    assert told.count('"') == plain.ganesha(server).count('"')
    rest = told.replace(f'"{path}"', '"/mnt/kv"').replace(f"at {path},", "at /mnt/kv,")
    assert rest == plain.ganesha(server)


def test_no_text_takes_for_ever() -> None:
    answers_in_time(lambda text: networks("--allow", [text]), ConfigError)
    answers_in_time(lambda text: owner("--all-as", text), ConfigError)
    answers_in_time(lambda text: Export(Path("/" + text), FSID, ()), ConfigError)


def test_export_squashes_root_by_default() -> None:
    """A client's root maps to nobody, and clients' programs are root's."""
    export = Export(Path("/mnt/kv"), FSID, networks("--allow", ["10.0.0.0/8"]))
    options = export.line().partition("(")[2].split(",")
    assert "root_squash" in options
    assert not {"no_root_squash", "insecure"} & set(options)
    told = export.ganesha(NfsServer("127.0.0.1", 2049, 0, Path("/run/kvfs/x")))
    assert "    Access_Type = None;" in told
    assert "PrivilegedPort = true;" in told
    assert set(re.findall(r"Squash = (\w+);", told)) == {"Root_Squash"}
