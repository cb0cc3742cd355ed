"""Namespaces on a real mount: the command line, attributes, and the promises to users."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import USUAL, Mount
from tests.harness import KVFS, PATIENCE, Mounted, wait_for

MIB = 1 << 20
DATA = b"\xa5" * MIB  # no zeros: movers leave holes for them


@pytest.fixture
def kv(emptied: Mount) -> Mounted:
    return emptied(USUAL)


def ns(*arguments: object, fails: int = 0) -> str:
    """Run `kvfs ns ...`; return its output, or its one line of refusal."""
    command = [*KVFS, "ns", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == fails, (command, done)
    if not fails:
        assert done.stderr == ""
        return done.stdout
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("kvfs: ").rstrip("\n")


def shown(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ns("show", path, "--json"))
    return found


def listed(kv: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ns("list", kv.path, "--json"))
    return found


def refused(number: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        call(*arguments)
    assert caught.value.errno == number, caught.value


# The command line


def test_the_life_of_a_namespace(kv: Mounted) -> None:
    a = kv.path / "a"
    assert ns("create", a, "quota_hard=100M", "weight=7") == (
        "namespace a: created with quota_hard=100M, weight=7\n"
    )
    (a / "x").write_bytes(b"k" * MIB)
    line = "namespace a: eviction adaptive -> lru, ttl 0 -> 1h\n"
    assert ns("set", a, "eviction=lru", "ttl=1h") == line
    nothing = "namespace a: nothing changed: the settings are as before\n"
    assert ns("set", a, "eviction=lru") == nothing
    found = shown(a)
    assert (found["name"], found["own"], found["objects"], found["bytes"]) == ("a", True, 1, MIB)
    told = {name: found["settings"][name] for name in ("quota_hard", "weight", "ttl")}
    assert told == {"quota_hard": "100M", "weight": "7", "ttl": "1h"}
    text = " ".join(ns("show", a).split())
    for words in ("quota_hard 100M", "objects 1", "bytes 1.0 MiB", "follows lru", "written 1"):
        assert words in text
    assert [one["name"] for one in listed(kv)["namespaces"]] == [".", "a"]
    assert listed(kv)["dropped"] == []
    assert "a 1 1.0 MiB 0 B 1.0% of 100M" in " ".join(ns("list", kv.path).split())
    ns("drop", a, "--wait")
    assert not a.exists()
    assert listed(kv)["dropped"] == []
    assert kv.idle()["objects"] == 0


def test_a_directory_without_settings_is_dropped_alike(kv: Mounted) -> None:
    """Files with names elsewhere stay; a process inside the directory finds no file any more."""
    a = kv.path / "a"
    (a / "b").mkdir(parents=True)
    for number in range(200):
        (a / "b" / f"{number}").write_bytes(b"k")
    os.link(a / "b" / "0", kv.path / "kept")
    text = " ".join(ns("show", a).split())
    assert text.startswith("namespace a: the directory has no settings of its own: this is the")
    inside = os.open(a / "b", os.O_RDONLY | os.O_DIRECTORY)
    try:
        dropped = "namespace a: dropped, its space becomes free in the background\n"
        assert ns("drop", a) == dropped
        assert os.listdir(kv.path) == ["kept"]
        for call in (os.stat, os.unlink):
            with pytest.raises(FileNotFoundError):
                call("1", dir_fd=inside)
        a.mkdir()
        (a / "new").write_bytes(b"n")
        wait_for(lambda: listed(kv)["dropped"] == [], "its space is free")
    finally:
        os.close(inside)
    assert (kv.path / "kept").read_bytes() == b"k"
    assert (a / "new").read_bytes() == b"n"
    assert kv.idle()["objects"] == 2
    ns("drop", a, "--wait")
    assert kv.idle()["objects"] == 1


def test_models_are_shown(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a)
    for number in range(3):
        (a / f"meta-SEP-llama@1@0@{number:x}@half.data").write_bytes(b"k" * MIB)
    (kv.path / "meta-SEP-other@1@0@1@half.data").write_bytes(b"k")
    kv.idle()
    row = "lmcache meta/llama 3 3.0 MiB"
    assert row in " ".join(ns("list", kv.path).split())
    status = subprocess.run([*KVFS, "status", kv.path], capture_output=True, text=True, check=True)
    assert row in " ".join(status.stdout.split())
    shown = " ".join(ns("show", a).split())
    assert row in shown
    assert "meta/other" not in shown


# A command among these mounts of kvfs only, whoever else has one: in a mount namespace of its own.
AMONG = """
awk '$3 == "fuse.kvfs" { print $2 }' /proc/mounts | grep --invert-match "$1" | xargs -r umount -l
shift
exec "$@"
"""


def test_a_name_alone_is_enough_where_one_kvfs_is_mounted(mount: Mount, tmp_path: Path) -> None:
    first, second = (mount("ram=32M", name) for name in ("first", "second"))

    def create(name: str, among: Path) -> subprocess.CompletedProcess[str]:
        alone = ["unshare", "--mount", "sh", "-c", AMONG, "sh", f"^{among}"]
        command = [*alone, *KVFS, "ns", "create", name]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )

    done = create("a", first.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(first.path) == ["a"]
    done = create("b", tmp_path)
    assert done.returncode == 2
    assert "2 kvfs are mounted; give the whole path" in done.stderr
    assert os.listdir(second.path) == []


def test_a_word_without_a_slash_may_be_a_path(mount: Mount) -> None:
    """Of a mount, or of a namespace on the mount that is the working directory."""
    first, second = (mount("ram=32M", name) for name in ("first", "second"))

    def ns(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
        command = [*KVFS, "ns", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=at
        )

    done = ns("set", "first", "weight=3", at=first.path.parent)
    assert (done.returncode, done.stdout) == (0, "namespace .: weight 100 -> 3\n")
    assert ns("create", "a", at=second.path).returncode == 0
    assert os.listdir(second.path) == ["a"]
    done = ns("drop", "first", at=first.path.parent)
    assert "the mount's own namespace cannot be dropped" in done.stderr
    assert os.listdir(first.path) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("create", "{a}", "quota_hard"), 2, "quota_hard: expected NAME=VALUE"),
        (("create", "{a}", "pin=on", "pin=off"), 2, "setting pin is given twice"),
        (("create", "{a}", "ttl=soon"), 2, "setting ttl=soon: expected "),
        (("create", "{a}", "pin=on", "ttl=1h"), 2, "setting pin=on contradicts ttl=1h"),
        (("create", "{a}", "media=s3"), 2, "setting media=s3: this mount has no s3 tier"),
        (("create", "{there}"), 2, "namespace there exists: change it with kvfs ns set"),
        (("set", "{a}", "pin=on"), 2, "namespace a: there is no such directory"),
        (("set", "{there}", "pin=perhaps"), 2, "setting pin=perhaps: expected on or off"),
        (("set", "{there}", "version=0"), 2, "setting version=0: expected "),
        (("set", "{kv}", "version=2"), 2, "setting version: the mount itself has none"),
        (("drop", "{kv}"), 2, "the mount's own namespace cannot be dropped"),
        (("drop", "{a}"), 2, "namespace a: there is no such directory"),
        (("show", "{there}/deeper"), 2, "namespace {there}/deeper: expected a directory right"),
        (("create", "{kv}/.."), 2, "namespace {kv}/..: .. is no name"),
        (("show", ""), 2, "Invalid value for 'NAMESPACE': the namespace is empty"),
    ],
)
def test_refused_ns_command_gives_its_reason(
    kv: Mounted, arguments: tuple[str, ...], code: int, said: str
) -> None:
    places = {"kv": kv.path, "a": kv.path / "a", "there": kv.path / "there"}
    ns("create", places["there"])
    found = ns(*(word.format(**places) for word in arguments), fails=code)
    assert found.startswith(said.format(**places)), found
    assert os.listdir(kv.path) == ["there"]


def test_drop_of_a_symbolic_link_is_refused(kv: Mounted) -> None:
    victim, link = kv.path / "victim", kv.path / "link"
    ns("create", victim)
    link.symlink_to("victim")
    for path in (link, f"{link}/"):
        said = f"expected a directory, found a symbolic link to {victim}"
        assert said in ns("drop", path, fails=2)
    assert sorted(os.listdir(kv.path)) == ["link", "victim"]


def test_setting_may_need_a_setting_that_is_already_there(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a, "ttl=1h", "quota_hard=10M")
    ns("set", a, "eviction=ttl", "quota_soft=5M")
    assert shown(a)["settings"]["eviction"] == "ttl"


def test_ns_create_for_a_connector_prints_its_configuration(kv: Mounted) -> None:
    text = ns("create", kv.path / "a", "--for", "lmcache-local-disk", "quota_hard=100M")
    assert f"{kv.path}/a" in text
    assert shown(kv.path / "a")["settings"]["eviction"] == "never"
    assert ns("show", kv.path / "a", "--for", "lmcache-local-disk") == text
    for words in (["namespace", "a"], ["bytes", "0", "B", "of", "100.0", "MiB,", "0%"]):
        assert words in [one.split() for one in ns("show", kv.path / "a").splitlines()]


def test_settings_that_no_engine_could_use_are_refused(kv: Mounted) -> None:
    create = ("create", kv.path / "a", "--for", "lmcache-fs")
    assert "quota_hard=32M of namespace 'a': expected" in ns(*create, "quota_hard=32M", fails=2)
    assert os.listdir(kv.path) == []
    ns(*create, "quota_hard=64M")
    assert "kvfs ns show --for" in ns(*create, "quota_hard=64M", fails=2)


# Attributes and templates


def test_attributes_tell_and_ask(kv: Mounted) -> None:
    a = kv.path / "a"
    a.mkdir()
    assert os.listxattr(a) == []
    os.setxattr(a, "user.kvfs.ttl", b"1h")
    os.setxattr(a, "user.mine", b"1")
    assert os.getxattr(a, "user.kvfs.ttl") == b"1h"
    assert sorted(os.listxattr(a)) == ["user.kvfs.ttl", "user.mine"]
    assert shown(a)["own"]
    os.removexattr(a, "user.kvfs.ttl")
    assert os.listxattr(a) == ["user.mine"]
    refused(errno.ENODATA, os.getxattr, a, "user.kvfs.nonsense")
    (kv.path / "b").mkdir()
    refused(errno.ENODATA, os.removexattr, kv.path / "b", "user.kvfs.ttl")
    assert not shown(kv.path / "b")["own"]


def test_an_attribute_that_is_refused_is_explained_in_the_log(kv: Mounted) -> None:
    (kv.path / "a" / "b").mkdir(parents=True)
    (kv.path / "f").write_bytes(b"")
    kv.expect_log(r"attribute user.kvfs.ttl is refused: setting ttl=soon: expected ")
    kv.expect_log(r"attribute user.kvfs.pin is refused: setting pin=\\n\\x1b\[2Jx{1,190}$")
    refused(errno.EINVAL, os.setxattr, kv.path / "a", "user.kvfs.pin", b"\n\x1b[2J" + b"x" * 5000)
    kv.expect_log(r"attribute user.kvfs.ttll is refused: unknown setting 'ttll'; did you mean ttl")
    kv.expect_log(
        r"attribute user.kvfs.(pin|weight) is refused: .*expected on the mount point or on a top-"
    )
    kv.expect_log(r"attribute user.kvfs.version is refused: setting version: kvfs has no default")
    refused(errno.EINVAL, os.setxattr, kv.path / "a", "user.kvfs.ttl", b"soon")
    refused(errno.EINVAL, os.setxattr, kv.path / "a", "user.kvfs.ttll", b"1")
    refused(errno.EINVAL, os.setxattr, kv.path / "a" / "b", "user.kvfs.pin", b"on")
    refused(errno.EINVAL, os.setxattr, kv.path / "f", "user.kvfs.weight", b"2")
    os.setxattr(kv.path / "a", "user.kvfs.pin", b"on")
    refused(errno.EINVAL, os.removexattr, kv.path / "a", "user.kvfs.version")


def test_templates_give_the_settings_of_a_new_directory(mount: Mount, tmp_path: Path) -> None:
    file = tmp_path / "namespaces.toml"
    file.write_text('[namespace."tmp-*"]\nttl = "1h"\n[namespace."*"]\nquota_hard = "10M"\n')
    kv = mount("ram=64M,namespaces={tmp}/namespaces.toml")
    for name in ("tmp-1", "other"):
        (kv.path / name).mkdir()
    assert shown(kv.path / "tmp-1")["settings"]["ttl"] == "1h"
    assert shown(kv.path / "other")["settings"]["quota_hard"] == "10M"
    file.write_text("nonsense")
    kv.expect_log(
        "new namespaces get no settings until this is mended and kvfs upgrade run: .*spaces.toml"
    )
    kv.kill_daemon()
    (kv.path / "third").mkdir()
    assert not shown(kv.path / "third")["own"], "the mount goes on"
    assert shown(kv.path / "tmp-1")["settings"]["ttl"] == "1h"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[namespace.a]\nttll = 1\n", "unknown setting 'ttll'"),
        ('[namespace.a]\nmedia = "nvme"\n', "setting media=nvme: this mount has no nvme tier"),
    ],
)
def test_a_templates_file_that_is_wrong_ends_the_mount_before_it_begins(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "t.toml").write_text(text)
    path = tmp_path / "kv"
    path.mkdir()
    command = [*KVFS, "mount", str(path), "-o", f"ram=64M,namespaces={tmp_path}/t.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert f'{tmp_path}/t.toml: [namespace."a"]: {said}' in done.stderr
    assert not os.path.ismount(path)


# Quotas, pins, lives


def test_a_full_namespace_says_so_and_others_do_not_notice(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a, "quota_hard=4M", "eviction=never")
    for number in range(4):
        (a / f"{number}.kv").write_bytes(DATA)
    refused(errno.EDQUOT, (a / "4.kv").write_bytes, DATA)
    (kv.path / "4.kv").write_bytes(DATA)
    ns("set", a, "eviction=lru")
    (a / "4.kv").write_bytes(DATA)
    assert shown(a)["bytes"] <= 4 * MIB
    assert len(os.listdir(a)) == 4
    assert (a / "4.kv").exists()
    ns("set", a, "quota_hard=2M")
    wait_for(lambda: shown(a)["bytes"] <= 2 * MIB, "the smaller quota is kept")
    assert (a / "4.kv").exists()
    counters = kv.status()["counters"]
    assert (counters["dropped_quota"], counters["dropped_evicted"]) == (2, 1)
    assert "namespace a: its hard quota was set to 2M, and kvfs dropped 2 obj" in kv.log.read_text()


def test_connectors_files_stay_while_everything_else_goes(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=128M")
    (kv.path / "a").mkdir()
    kept = [kv.path / "a" / f"model@1@0@{number:x}@half.pt" for number in range(12)]
    for path in kept:
        path.write_bytes(os.fsencode(path) + DATA * 4)
    for number in range(60):
        (kv.path / "a" / f"{number}.kv").write_bytes(DATA * 4)
    assert kv.idle()["counters"]["dropped"] > 20
    for path in kept:
        assert path.read_bytes() == os.fsencode(path) + DATA * 4


def test_expired_file_is_enoent_for_names_that_the_kernel_knows(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a, "ttl=1s")
    (a / "y").write_bytes(b"k")
    writer = (a / "x").open("wb", buffering=0)
    with (a / "x").open("rb") as held:  # its second begins when it is sealed
        writer.write(b"k")
        writer.close()
        wait_for(lambda: not (a / "x").exists(), "a name that the kernel knew has expired")
        wait_for(lambda: os.listdir(a) == [], "the other one has, too")
        assert held.read() == b"k"
        ns("set", a, "ttl=1h")
        (a / "z").write_bytes(b"new")
        assert (a / "z").read_bytes() == b"new"
    ns("set", a, "ttl=0")
    assert (a / "z").exists()


# Publishing


def test_two_writers_of_one_chunk_and_a_daemon_that_dies(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a, "publish=close")
    one = os.open(a / "x", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    two = os.open(a / "x", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(one, b"one")
    os.write(two, b"two")
    assert os.fstat(one).st_nlink == 1
    assert not (a / "x").exists()
    assert os.listdir(a) == []
    kv.kill_daemon()
    assert not (a / "x").exists()
    os.write(two, b" and all")
    os.close(two)
    assert (a / "x").read_bytes() == b"two and all"
    os.write(one, b" more")
    os.close(one)
    assert (a / "x").read_bytes() == b"two and all"
    wait_for(lambda: kv.status()["counters"].get("outrun") == 1, "who came too late is counted")
    assert kv.idle()["objects"] == 1


def test_a_shell_publishes_when_it_is_done(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a, "publish=close")
    subprocess.run(["sh", "-c", f"(ls {a}; echo all) > {a}/x; : > {a}/empty"], check=True)
    assert (a / "x").read_bytes() == b"all\n"
    # Empty, it may yet be written to by another descriptor of the shell: it is done at its release,
    # which the kernel tells of later.
    wait_for((a / "empty").exists, "what is empty is published, too")


# Switched and dropped, with somebody inside

INSIDE = """
import os, sys
os.chdir(sys.argv[1])
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


class Inside:
    """A process whose working directory is in a namespace."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", INSIDE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().rstrip("\n")

    def end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(PATIENCE) == 0


@pytest.mark.parametrize("deep", ["", "d"])
@pytest.mark.parametrize("how", ["version", "drop"])
def test_process_inside_a_dropped_namespace_gets_enoent(kv: Mounted, how: str, deep: str) -> None:
    a = kv.path / "a"
    ns("create", a, "weight=7")
    (a / "d").mkdir()
    for path in (a / deep / "x", a / deep / "y"):
        path.write_bytes(b"k")
    missing = str(errno.ENOENT)
    with ExitStack() as stack:
        inside = Inside(a / deep)
        stack.callback(inside.end)
        assert inside("os.stat('x').st_size") == "1"
        if how == "version":
            ns("set", a, "version=2")
        else:
            ns("drop", a)
        for when in ("at once", "after the walk"):
            for name in ("x", "y", "d/x", str(a / deep / "x")):
                assert inside(f"os.stat({name!r})") == missing, (name, when)
            for call in (
                "os.open('y', os.O_RDONLY)",
                "os.open('new', os.O_CREAT | os.O_WRONLY)",
                "os.mkdir('new')",
                "os.rename('x', 'z')",
            ):
                assert inside(call) == missing, (call, when)
            wait_for(lambda: not listed(kv)["dropped"], "the walk has ended")
    if how == "version":
        assert os.listdir(a) == []
        (a / "x").write_bytes(b"new")
        assert shown(a)["settings"]["weight"] == "7"
    else:
        assert os.listdir(kv.path) == []


def test_open_files_outlive_their_dropped_namespace(kv: Mounted) -> None:
    a = kv.path / "a"
    ns("create", a)
    (a / "x").write_bytes(b"k" * MIB)
    with (a / "x").open("rb") as reader, (a / "y").open("wb", buffering=0) as writer:
        writer.write(b"before")
        ns("drop", a, "--wait")
        kv.kill_daemon()
        ns("create", a)
        assert reader.read() == b"k" * MIB
        writer.write(b" after")
        assert os.fstat(writer.fileno()).st_size == 12
        assert os.listdir(a) == []
    assert os.listdir(a) == []
    wait_for(lambda: kv.idle()["objects"] == 0, "what was open goes with its last handle")


def test_between_namespaces_a_file_moves_and_a_link_is_refused(kv: Mounted) -> None:
    a, b = kv.path / "a", kv.path / "b"
    for path in (a, b):
        ns("create", path)
    (a / "x").write_bytes(b"k" * MIB)
    refused(errno.EXDEV, os.link, a / "x", b / "y")
    refused(errno.EXDEV, os.rename, a, b / "a")
    (a / "x").rename(b / "x")
    assert (shown(a)["objects"], shown(b)["objects"]) == (0, 1)
    os.link(b / "x", b / "y")
    refused(errno.EXDEV, os.rename, b / "y", a / "y")
    (b / "d").mkdir()
    (b / "d" / "x").write_bytes(b"k")
    (b / "d").rename(a / "d")
    wait_for(lambda: shown(a)["objects"] == 1, "a directory is accounted anew")
    a.rename(kv.path / "c")
    assert shown(kv.path / "c")["objects"] == 1


# Limits


def test_an_open_waits_for_its_turn_and_goes_when_the_limit_does(kv: Mounted) -> None:
    """The second open would wait for an hour; it returns because the limit is removed."""
    a = kv.path / "a"
    ns("create", a)
    (a / "x").write_bytes(DATA)
    (kv.path / "y").write_bytes(b"other")
    ns("set", a, "read_bytes=300B")
    order: list[str] = []

    def read() -> None:
        assert (a / "x").read_bytes() == DATA
        order.append("read")

    read()
    second = threading.Thread(target=read)
    second.start()
    assert (kv.path / "y").read_bytes() == b"other", "nobody else waits"
    order.append("other")
    assert (a / "x").stat().st_size == MIB, "names are free"
    ns("set", a, "read_bytes=0")
    second.join(PATIENCE)
    assert not second.is_alive()
    assert order == ["read", "other", "read"]


# For good


def check_kept(kv: Mounted) -> None:
    a = kv.path / "a"
    found = shown(a)
    told = {name: found["settings"][name] for name in ("quota_hard", "weight", "mode", "version")}
    assert told == {"quota_hard": "50M", "weight": "7", "mode": "0640", "version": "2"}
    assert (found["objects"], found["bytes"]) == (1, MIB)
    assert shown(kv.path)["settings"]["weight"] == "9"
    (a / "new").write_bytes(b"k")
    assert (a / "new").stat().st_mode & 0o777 == 0o640
    (a / "new").unlink()
    assert [one["name"] for one in listed(kv)["namespaces"]] == [".", "a"]
    assert listed(kv)["dropped"] == []


def test_an_upgrade_with_bad_templates_is_refused_before_anything_changes(
    mount: Callable[[str], Mounted], tmp_path: Path
) -> None:
    file = tmp_path / "namespaces.toml"
    file.write_text('[namespace."*"]\nweight = 7')
    kv = mount(f"ram=64M,namespaces={file}")
    before = kv.pid
    for text, said in (
        ("[namespace.a]\nweight = 0", "setting weight=0: expected"),
        ("[namespace.a]\nmedia = 'nvme'", "setting media=nvme: this mount has no nvme tier"),
    ):
        file.write_text(text)
        done = subprocess.run(
            [*KVFS, "upgrade", kv.path],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 2
        assert f'{file}: [namespace."a"]: {said}' in done.stderr
    assert kv.pid == before
    (kv.path / "a").mkdir()
    assert shown(kv.path / "a")["settings"]["weight"] == "7"


@pytest.mark.parametrize("how", ["upgrade", "kill", "remount"])
def test_namespaces_are_kept(mount: Mount, how: str) -> None:
    kv = mount(USUAL)
    a = kv.path / "a"
    ns("create", a, "quota_hard=50M", "mode=0640")
    (a / "old").write_bytes(b"k")
    ns("set", a, "weight=7", "version=2")
    ns("set", kv.path, "weight=9")
    (a / "x").write_bytes(DATA)
    ns("create", kv.path / "b")
    ns("drop", kv.path / "b", "--wait")
    check_kept(kv)
    if how == "upgrade":
        subprocess.run([*KVFS, "upgrade", kv.path], check=True, timeout=PATIENCE)
    elif how == "kill":
        kv.kill_daemon()
    else:
        kv.remount()
    kv.idle()
    check_kept(kv)


def test_only_what_a_writer_wrote_counts_as_written(kv: Mounted) -> None:
    path = kv.path / "a" / "file"
    ns("create", path.parent)
    path.write_bytes(DATA)

    def counted(objects: int, size: int) -> None:
        def now() -> tuple[int, int]:
            counters = shown(path.parent)["counters"]
            return counters.get("written", 0), counters.get("written_bytes", 0)

        wait_for(lambda: kv.status()["open_handles"] == 0, "nobody has a file open")
        assert now() == (objects, size)

    counted(1, MIB)
    subprocess.run(["touch", path], check=True)
    os.close(os.open(path, os.O_RDWR))
    counted(1, MIB)
    subprocess.run(["sh", "-c", f"echo a >> {path}"], check=True)
    counted(2, MIB + 2)
    os.truncate(path, MIB)
    counted(2, MIB + 2)
    path.write_bytes(b"new")
    counted(3, MIB + 5)
