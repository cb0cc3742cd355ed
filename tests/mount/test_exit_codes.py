"""The same fault has the same exit code in every command, and one line says what to do.

2 is a fault of the caller, and nothing has changed; 1 is a fault of the world. `kvfs fsck` has the
codes of fsck(8): where the world is at fault, it exits with 8.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from kvfs import runtime
from kvfs.cli import COMMANDS
from kvfs.mounts import MNT_DETACH, mount, umount
from tests.conftest import Mount
from tests.harness import KVFS

CALLER, WORLD, FSCK_FAILED = 2, 1, 8
ASKED = (  # by all commands that ask a mount, {at}: its mount point
    "status {at}",
    "get {at}",
    "set {at} promote_after=3",
    "remount {at} -o promote_after=3",
    "upgrade {at}",
    "top --once {at}",
    "flush {at}",
    "pool {at}",
    "import {at}",
    "bench {at}",
    "export {at}",
    "ns list {at}",
    "ns show {at}/x",
    "ns set {at}/x ttl=1d",
    "ns create {at}/x",
    "ns drop {at}/x",
    "connect lmcache {at}/x",
    "evict {at}",
    "warm {at}",
    "pin {at}",
    "du {at}",
    "stat {at}",
    "fsck {at}",
    "gc {at}",
)
# Any path on the mount will do.
OF_ANY_PATH = {
    *("status {at}", "get {at}", "set {at} promote_after=3", "remount {at} -o promote_after=3"),
    *("upgrade {at}", "top --once {at}", "flush {at}", "pool {at}", "import {at}", "bench {at}"),
    *("export {at}", "ns list {at}", "fsck {at}", "gc {at}"),
}
FAULTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "not a mount": (
        CALLER,
        r"{tmp}/plain(/x)?:? (is|expected)",
        (
            *tuple(line.format(at="{tmp}/plain") for line in (*ASKED, "umount {at}")),
            "match {tmp}/plain/x --tokens {tmp}/tokens",
        ),
    ),
    "an empty path": (
        CALLER,
        r"(path|mount point|namespace) is empty",
        (
            *(f"{name} ''" for name in ("stat", "evict", "warm", "pin", "du", "status", "umount")),
            "ns show ''",
        ),
    ),
    "no such path": (
        CALLER,
        r"/none\S* (is|does|expected)|/none\S*:? (\S+ )*(expected|No such|cannot|/none)",
        (
            *(f"{name} {{kv}}/none" for name in ("stat", "evict", "warm", "pin", "du")),
            *(f"{name} {{tmp}}/none" for name in ("stat", "evict", "warm", "pin", "du")),
            *(line.format(at="{kv}/none") for line in ASKED if line in OF_ANY_PATH),
            "match {kv}/none --tokens {tmp}/tokens",
            "match {kv}/full --tokens /none",
            "profile /none",
            "simulate /none --capacity 5%",
            "replay /none {kv}",
            "replay {tmp}/trace /none",
            "replay {tmp}/trace {kv} /none",
            "bench {kv} --against /none",
            "export {kv} -o /none/x",
            "doctor --bundle /none/x.tar.gz",
            "simulate {tmp}/trace --capacity 5% --plot /none/x.png",
            "mount /none",
            "mount {tmp}/plain -o nvme=/none/a/b",
            "upgrade {kv} -o namespaces=/none/x.toml",
            "remount {kv} -o log=/none/x/y",
            "set {kv} access_log=/none/x",
            "fsck /none",
            "gc /none",
            "setup --root /none",
        ),
    ),
    "unknown namespace": (
        CALLER,
        r"namespace \S*none: (there is no such directory|expected a directory)",
        (
            "ns show {kv}/none",
            "ns set {kv}/none ttl=1d",
            "ns drop {kv}/none",
            "connect lmcache {kv}/none",
            "match {kv}/none --tokens {tmp}/tokens",
        ),
    ),
    "a namespace that exists": (CALLER, "namespace full exists: .*", ("ns create {kv}/full",)),
    "unknown option": (
        CALLER,
        r"'?(ramm|quotta)'?; did you mean",
        (
            "mount {tmp}/plain -o ramm=1",
            "get {kv} ramm",
            "set {kv} ramm=1",
            "remount {kv} -o ramm=1",
            "upgrade {kv} -o ramm=1",
            "gc -o ramm=1",
            "fsck {tmp}/other -o ramm=1",
            "ns create {kv}/x quotta=1",
            "ns set {kv}/full quotta=1",
        ),
    ),
    "unknown word": (
        CALLER,
        r"'?(foo)'?(:| is not) .*(expected|one of)",
        (
            "connect foo {kv}/full",
            "ns create {kv}/x --for foo",
            "simulate {tmp}/trace --capacity 5% --policy foo",
            "simulate {tmp}/trace --capacity 5% --nodes 2 --routing foo",
            "simulate {tmp}/trace --capacity 5% --nodes 2 --copies foo",
            "evict {kv} --to foo",
            "du {kv} --by foo",
        ),
    ),
    "wrong value": (
        CALLER,
        r"[= ]'?-5.*(expected|not a valid|is not in the range)",
        (
            "mount {tmp}/plain -o ram=-5",
            "set {kv} bandwidth=-5",
            "remount {kv} -o ram=-5",
            "upgrade {kv} -o ram=-5",
            "ns create {kv}/x quota_hard=-5",
            "ns set {kv}/full quota_hard=-5",
            "simulate {tmp}/trace --capacity=-5",
            "simulate {tmp}/trace --capacity 5% --nodes=-5",
            "replay {tmp}/trace {kv} --block-size=-5",
            "gc {kv} --older-than=-5",
            "top {kv} --once -i -5",
            "replay {tmp}/trace {kv} --speed=-5",
            "export {kv} --port -5",
            "fsck {tmp}/other -o s3_endpoint=-5",
            "profile {tmp}/trace --limit -5",
        ),
    ),
    "no number": (
        CALLER,
        r"'?(nan|inf|x)'? .*(expected|not a valid|is not in the range)",
        tuple(
            f"{line}{value}"
            for line in ("top {kv} --once -i ", "replay {tmp}/trace {kv} --speed=")
            for value in ("nan", "inf", "x")
        ),
    ),
    "no pool": (CALLER, "has no pool: mount it with pool=", ("pool {kv}",)),
    "no bucket": (
        CALLER,
        "has no bucket.*s3=|no bucket; --drop|no bucket; mount",
        (
            *("flush {kv}", "flush {kv} --wait", "import {kv}", "gc {kv}", "fsck {kv} --bucket"),
            "evict {kv} --to s3",
        ),
    ),
    "another user's mount": (
        CALLER,
        "uid 12345 may not ask {kv}, it was mounted by root: use sudo",
        tuple(line.format(at="{kv}") for line in (*ASKED, "umount {at}")),
    ),
    "another user's mount without allow_other": (
        CALLER,
        "uid 12345 may not ask {away}, it was mounted by root: use sudo",
        (
            *(line.format(at="{away}") for line in ASKED if not line.startswith("export")),
            "umount {away}",
            *(f"{name} {{away}}/file" for name in ("stat", "evict", "warm", "pin", "du")),
            "match {away}/file --tokens {tmp}/tokens",
            "replay {tmp}/trace {away}",
        ),
    ),
    "in use": (
        CALLER,
        "is in use|is already a mount point|is mounted, and knows",
        (
            "mount {kv}",
            "mount {tmp}/plain -o nvme={tmp}/nvme",
            "fsck {tmp}/nvme",
            "gc {tmp}/nvme",
            "fsck {kv} -o s3=s3://abc",
            "gc {kv} -o s3=s3://abc",
        ),
    ),
    "no daemon answers": (
        WORLD,
        "no daemon answers for {tmp}/dead .*umount {tmp}/dead",
        (
            *(line.format(at="{tmp}/dead") for line in ASKED),
            "match {tmp}/dead/x --tokens {tmp}/tokens",
            "replay {tmp}/trace {tmp}/dead",
        ),
    ),
    "the bucket is away": (
        WORLD,
        r"127\.0\.0\.1:1|is down|cannot be reached|not yet in",
        (
            *("flush {away} --wait", "import {away}", "gc {away}", "fsck {away} --bucket"),
            "mount {tmp}/plain -o ram=16M,s3=s3://abc,s3_endpoint=http://127.0.0.1:1",
        ),
    ),
    "the disk is full": (
        WORLD,
        "{tmp}/tight/x.*: No space left on device: make room there",
        ("export {kv} -o {tmp}/tight/x", "doctor --bundle {tmp}/tight/x.gz --no-fsck"),
    ),
}
CASES = [(fault, line) for fault, (_, _, lines) in FAULTS.items() for line in lines]
# They ask no mount, or list the faults of mounts.
ASK_NONE = {"mounts", "doctor", "version", "umount", "mount", "setup"}


@pytest.fixture(scope="module", autouse=True)
def _credentials() -> Iterator[None]:
    """Of no server; without them it is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "nobodys")
        yield


@pytest.fixture(scope="module")
def places(module_mount: Mount) -> Iterator[dict[str, str]]:
    """One mount, one without its bucket, one without a daemon, and other places."""
    kv = module_mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M,allow_other")
    tmp = kv.path.parent
    away = module_mount(
        "ram=32M,s3=s3://abc,s3_endpoint=http://127.0.0.1:1,s3_required=off", "away"
    )
    away.allow_log(".*")
    other = module_mount("ram=16M,nvme={tmp}/other,nvme_size=64M", "kv2")
    other.umount()
    for name in ("plain", "dead", "tight"):
        (tmp / name).mkdir()
    for above in (tmp, *tmp.parents[:3]):  # for the other user
        above.chmod(above.stat().st_mode | 0o055)
    (tmp / "tokens").write_text("1 2 3")
    line = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    (tmp / "trace").write_text(line)
    _done("ns", "create", f"{kv.path}/full")
    (away.path / "file").write_bytes(b"content")
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    mount("kvfs", tmp / "dead", runtime.FSTYPE, 0, options)
    os.close(device)
    mount("none", tmp / "tight", "tmpfs", 0, "size=4k,nr_inodes=9")
    (tmp / "tight" / "rest").write_bytes(bytes(4096))
    try:
        yield {"tmp": str(tmp), "kv": str(kv.path), "away": str(away.path)}
    finally:
        umount(tmp / "dead", MNT_DETACH)
        umount(tmp / "tight", MNT_DETACH)


def _done(*words: str, before: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    command = [*before, *KVFS, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(("fault", "line"), CASES)
def test_a_fault_has_one_code_and_one_line(places: dict[str, str], fault: str, line: str) -> None:
    code, words, _ = FAULTS[fault]
    if code == WORLD and line.startswith("fsck"):
        code = FSCK_FAILED
    as_user: tuple[str, ...] = ()
    if fault.startswith("another user"):  # the capability is for the interpreter in root's home
        caps = "-all,+dac_read_search"
        as_user = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
        as_user += (f"--inh-caps={caps}", f"--ambient-caps={caps}")
    done = _done(*shlex.split(line.format_map(places)), before=as_user)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("kvfs: ")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.rstrip("\n").isprintable()
    pattern = words
    for name, path in places.items():
        pattern = pattern.replace(f"{{{name}}}", re.escape(path))
    assert re.search(pattern, done.stderr), done.stderr


def test_each_command_that_asks_a_mount_is_in_the_table() -> None:
    asked = {line.split()[0] for line in FAULTS["no daemon answers"][2]}
    assert set(COMMANDS) - asked == ASK_NONE | {"profile", "simulate"}
    assert {line.split()[0] for _, line in CASES} >= set(COMMANDS) - {"mounts", "version"}


def test_a_mount_of_another_user_is_no_reason_to_stop_for_root(places: dict[str, str]) -> None:
    """`kvfs mounts` lists what it may not ask, with the reason."""
    done = _done("mounts")
    assert done.returncode == 0
    assert f"{places['tmp']}/dead: no daemon answers" in done.stdout
