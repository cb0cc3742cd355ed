"""The options of a mount in use: `kvfs get`, and what `set`, `upgrade` and a remount change.

`mount -o remount` runs mount(8) itself, in a mount namespace where /usr/sbin has nothing but the
links that scripts/install.sh makes, to the helper of this checkout.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvfs import runtime
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, local, wait_for

ROOT = Path(__file__).parents[2]
HELPED = f"""
    mount -t tmpfs none /usr/sbin
    for name in mount.kvfs mount.fuse.kvfs; do ln -s {ROOT}/mount/mount.kvfs /usr/sbin/$name; done
    exec "$@"
"""
MIB = 1 << 20
NOTHING = "nothing changed: the options are as before\n"


def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return _done([*KVFS, *map(str, words)])


def mount8(kv: Mounted, words: str, fstab: str = "") -> "subprocess.CompletedProcess[str]":
    """Run mount(8). The mounts of its namespace are copies: flags of one mount do not come back."""
    table = kv.path.parent / "fstab"
    table.write_text(fstab)
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", HELPED, "sh"]
    command = ["env", f"LIBMOUNT_FSTAB={table}", "mount", "-o", words, str(kv.path)]
    return _done([*alone, *command])


def _done(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def small(mount: Mount) -> Mounted:
    return mount("ram=64M,movers=1,promote_after=2")


def value(kv: Mounted, name: str) -> str:
    done = run("get", kv.path, name)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.removesuffix("\n")


def refused(done: "subprocess.CompletedProcess[str]", *words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert [word for word in words if word not in done.stderr] == [], done.stderr


# get


def test_get_has_each_option_with_its_origin_and_change(small: Mounted) -> None:
    found = json.loads(run("get", small.path, "--json").stdout)
    assert found["ram"] == {"value": "64M", "origin": "set", "change": "kvfs upgrade"}
    assert found["promote_after"] == {"value": "2", "origin": "default", "change": "kvfs set"}
    assert found["nvme"] == {"value": None, "origin": "default", "change": "new mount"}
    assert found["log"]["value"] == str(small.log)
    assert found["mount_flags"] == {"value": None, "origin": "default", "change": "kvfs remount"}
    shown = run("get", small.path).stdout.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in shown}
    assert cells["ram"] == ["64M", "set", "kvfs", "upgrade"]
    assert set(found) < set(cells)


def test_get_tells_a_fitted_size_from_a_given_one(mount: Mount) -> None:
    kv = mount("nvme={tmp}/nvme,ram=64M")
    found = json.loads(run("get", kv.path, "ram", "nvme_size", "--json").stdout)
    assert {name: one["origin"] for name, one in found.items()} == {
        "ram": "set",
        "nvme_size": "default",
    }


def test_get_of_one_name_is_what_set_takes(small: Mounted) -> None:
    assert run("set", small.path, "s3_delay=7.5", "access_log=none").returncode == 0
    for name in ("promote_after", "verify_after", "access_log", "bandwidth"):
        done = run("set", small.path, f"{name}={value(small, name)}")
        assert (done.returncode, done.stdout) == (0, NOTHING), done.stderr


def test_get_prints_no_secret(small: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    assert "very-secret" not in run("get", small.path, "--json").stdout


def test_get_names_the_nearest_options(small: Mounted) -> None:
    refused(run("get", small.path, "promote"), "unknown option 'promote'", "promote_after")


# set, upgrade


def test_set_and_upgrade_print_each_change(small: Mounted) -> None:
    done = run("set", small.path, "promote_after=7", "bandwidth=64M")
    assert done.stdout.splitlines() == [
        "promote_after: 2 -> 7",
        "bandwidth: 0 B -> 64.0 MiB",
    ]
    assert run("set", small.path, "promote_after=7").stdout == NOTHING
    first, *rest = run("upgrade", small.path, "-o", "ram=128M,promote_after=7").stdout.splitlines()
    assert first.startswith(f"{small.path}: kvfs 0.1.0 -> 0.1.0, ")
    assert rest == ["ram: 64.0 MiB -> 128.0 MiB"]
    lines = run("upgrade", small.path, "-o", "ram=128M").stdout.splitlines()
    assert lines[1:] == NOTHING.splitlines()
    assert len(run("upgrade", small.path).stdout.splitlines()) == 1


@pytest.mark.parametrize("how", ["upgrade", "remount"])
def test_a_smaller_tier_says_what_goes(small: Mounted, how: str) -> None:
    for number in range(12):
        (small.path / str(number)).write_bytes(bytes(4 * MIB))
    lines = run(how, small.path, "-o", "ram=32M").stdout.splitlines()
    assert lines[1:] == [
        "ram: 64.0 MiB -> 32.0 MiB",
        (
            "ram: about 4 objects of 16.0 MiB go, as it has 48.0 MiB; the log says how many were "
            "dropped"
        ),
    ]
    said = "ram began with more than its size of 32.0 MiB"
    wait_for(lambda: said in small.log.read_text(), "a line of the log")
    dropped = small.counter("dropped_shrunk")
    assert dropped == small.counter("dropped") > 0
    assert f"kvfs dropped {dropped} objects of {dropped * 4}.0 MiB" in small.log.read_text()


@pytest.mark.parametrize("smaller", ["ram=16M", "nvme_size=20M", "ram=16M,nvme_size=20M"])
def test_the_log_says_what_smaller_tiers_drop(mount: Mount, smaller: str) -> None:
    """Objects go from NVMe, for those that leave RAM."""
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=40M,movers=1")
    for number in range(100):
        (kv.path / str(number)).write_bytes(b"x" * MIB)
    kv.idle()
    assert run("upgrade", kv.path, "-o", smaller).returncode == 0
    kv.allow_log("keeps its former size|nothing is demoted")
    wait_for(lambda: told(kv) and told(kv) == kv.counter("dropped_shrunk"), "all that went is told")
    assert told(kv) > 0
    tiers = " and ".join(option.partition("=")[0][:4].rstrip("_") for option in smaller.split(","))
    assert f" {tiers} began with more than " in kv.log.read_text()


def told(kv: Mounted) -> int:
    """The objects that went for smaller tiers, by the log."""
    line = r"began with more than .*, and kvfs dropped (\d+) objects of \1\.0 MiB for that"
    return sum(map(int, re.findall(line, kv.log.read_text())))


def test_an_upgrade_tells_copies_that_go_from_objects_that_go(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    for number in range(12):
        (kv.path / str(number)).write_bytes(b"x" * (4 * MIB))
    wait_for(lambda: not request(kv.path, "write_back")["bytes_left"], "all is on NVMe")
    kv.idle()
    lines = run("upgrade", kv.path, "-o", "ram=32M").stdout.splitlines()
    assert re.fullmatch(
        r"ram: the copies of about \d objects of \d+.0 MiB go, as it has 4\d.0 MiB; nvme keeps "
        "them",
        "\n".join(lines[2:]),
    )
    wait_for(lambda: kv.idle()["tiers"]["ram"]["used_bytes"] <= 32 * MIB, "RAM has its size")
    assert kv.counter("dropped") == 0


def test_an_upgrade_of_both_tiers_says_what_finds_no_room(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=64M")
    kv.allow_log("keeps its former size|nothing is demoted")
    for number in range(100):
        (kv.path / str(number)).write_bytes(b"x" * MIB)
    kv.idle()
    lines = run("upgrade", kv.path, "-o", "ram=32M,nvme_size=32M").stdout.splitlines()
    total = re.fullmatch(
        r"ram and nvme together: about (\d+) objects of .* MiB are dropped, as they have .* MiB, "
        r"and room for 64\.0 MiB",
        lines[-1],
    )
    assert total is not None, lines
    wait_for(
        lambda: all(tier["used_bytes"] <= 32 * MIB for tier in local(kv.idle()).values()),
        "both tiers have their sizes",
    )
    wait_for(lambda: told(kv) == kv.counter("dropped_shrunk"), "all that went is told")
    # Copies to NVMe go on meanwhile: an object in both tiers takes the room of another.
    tiers = [os.getxattr(path, "user.kvfs.tier") for path in kv.path.iterdir() if path.is_file()]
    most = int(total[1]) + 4 + tiers.count(b"ram+nvme")
    assert int(total[1]) <= told(kv) <= most, "RAM keeps some room free"


def test_a_smaller_tier_says_what_stays(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    assert run("ns", "create", kv.path / "kept", "eviction=never").returncode == 0
    for number in range(12):
        (kv.path / "kept" / str(number)).write_bytes(b"x" * (4 * MIB))
    wait_for(lambda: not request(kv.path, "write_back")["bytes_left"], "all is on NVMe")
    kv.idle()
    kv.expect_log("the nvme tier stays larger than its size: 48.0 MiB stay")
    stays = "48.0 MiB stay, more than its size of 32.0 MiB: kvfs evicts none of these objects"
    lines = run("upgrade", kv.path, "-o", "nvme_size=32M").stdout.splitlines()
    assert lines[2:] == [f"nvme: {stays}"]
    wait_for(lambda: stays in kv.status()["tiers"]["nvme"]["why"], "the status says it")
    assert kv.umount() == ""
    again = ["-o", f"ram=64M,nvme={kv.path.parent}/nvme,nvme_size=32M,log={kv.log}"]
    done = run("mount", kv.path, *again)
    assert (done.returncode, done.stderr) == (0, f"kvfs: nvme: {stays}\n")
    wait_for(lambda: stays in kv.status()["tiers"]["nvme"]["why"], "the status says it")
    assert len(list((kv.path / "kept").iterdir())) == 12


def test_a_mount_on_a_directory_with_other_files_names_one(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=64M")
    kv.umount()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    options = f"ram=64M,nvme={tmp_path}/mine,nvme_size=64M,log={kv.log}"
    told = "has files that are not kvfs's own, such as thesis.tex"
    assert told in run("mount", kv.path, "-o", options).stderr
    kv.umount()
    assert run("mount", kv.path, "-o", options).stderr == ""


def test_a_mount_with_a_smaller_nvme_says_what_goes(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    for number in range(12):
        (kv.path / str(number)).write_bytes(b"x" * (4 * MIB))
    wait_for(lambda: not request(kv.path, "write_back")["bytes_left"], "all is on NVMe")
    kv.idle()
    kv.umount()
    again = ["-o", f"ram=64M,nvme={kv.path.parent}/nvme,nvme_size=32M,log={kv.log}"]
    done = run("mount", kv.path, *again)
    assert done.returncode == 0
    assert re.fullmatch(
        r"kvfs: nvme: about 4 objects of 16\.\d MiB go, as it has 48\.\d MiB; the log says how "
        r"many were dropped\n",
        done.stderr,
    )
    wait_for(lambda: "kvfs dropped" in kv.log.read_text(), "a line of the log")


# remount


def test_mount_o_remount_changes_a_hot_option(small: Mounted) -> None:
    daemon = small.pid
    done = mount8(small, "remount,promote_after=5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "promote_after: 2 -> 5\n", "")
    assert value(small, "promote_after") == "5"
    assert small.pid == daemon


def test_mount_o_remount_changes_an_option_with_a_new_daemon(small: Mounted) -> None:
    daemon = small.pid
    (small.path / "file").write_bytes(b"content")
    done = mount8(small, "remount,ram=128M,promote_after=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["ram: 64.0 MiB -> 128.0 MiB", "promote_after: 2 -> 5"]
    assert small.status()["tiers"]["ram"]["capacity_bytes"] == 128 << 20
    assert small.pid != daemon
    assert (small.path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("words", ["remount", "remount,rw,promote_after=2,ram=64M,movers=1"])
def test_what_is_so_already_is_no_change(small: Mounted, words: str) -> None:
    daemon = small.pid
    done = mount8(small, words)
    assert (done.returncode, done.stdout, done.stderr) == (0, NOTHING, "")
    assert small.pid == daemon


def test_a_remount_adds_the_line_of_fstab_and_the_last_word_counts(small: Mounted) -> None:
    line = f"kvfs {small.path} kvfs ram=64M,movers=1,log={small.log},promote_after=3,nofail 0 0\n"
    done = mount8(small, "remount,promote_after=5", fstab=line)
    assert (done.returncode, done.stdout) == (0, "promote_after: 2 -> 5\n"), done.stderr
    done = mount8(small, "remount", fstab=line)
    assert (done.returncode, done.stdout) == (0, "promote_after: 5 -> 3\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nvme=/elsewhere", "cannot change nvme=/elsewhere of"),
        ("passthrough=off", "cannot change passthrough=off of"),
        ("allow_other", "cannot change allow_other=on of"),
        ("ramm=1G", "did you mean ram?"),
        ("ram=1K", "ram=1K: expected at least 16M"),
    ],
)
def test_a_refused_remount_changes_nothing(small: Mounted, words: str, told: str) -> None:
    before = run("get", small.path, "--json").stdout
    refused(mount8(small, f"remount,promote_after=9,noexec,{words}"), told)
    refused(run("remount", small.path, "-o", f"promote_after=9,noexec,{words}"), told)
    assert run("get", small.path, "--json").stdout == before


def test_flags_change_in_the_kernel_and_are_told(small: Mounted) -> None:
    (small.path / "file").write_bytes(b"content")
    done = run("remount", small.path, "-o", "ro,noexec,noatime")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "mount_flags: none -> ro,noexec,noatime\n"
    with pytest.raises(OSError, match="Read-only file system"):
        (small.path / "other").touch()
    assert value(small, "mount_flags") == "ro,noexec,noatime"
    assert "ro" in json.loads((small.path / ".kvfs" / "config").read_text())
    small.kill_daemon()
    assert value(small, "mount_flags") == "ro,noexec,noatime"
    done = run("remount", small.path, "-o", "rw,exec,relatime")
    assert done.stdout == "mount_flags: ro,noexec,noatime -> none\n", done.stderr
    (small.path / "other").touch()
    entry = runtime.mount_at(small.path)
    assert entry is not None
    assert {"nosuid", "nodev"} <= entry.words, "each mount of kvfs has these"


def test_a_mount_that_began_read_only_is_made_writable(mount: Mount) -> None:
    kv = mount("ram=64M,ro")
    done = mount8(kv, "remount,rw")
    assert (done.returncode, done.stdout) == (0, "mount_flags: ro -> none\n"), done.stderr
    # The other mounts of the same file system, as that of this process, keep their own flag.
    assert run("remount", kv.path, "-o", "rw").stdout == "mount_flags: ro -> none\n"
    (kv.path / "file").touch()


def test_suid_and_dev_are_taken_as_at_a_mount_and_have_no_effect(small: Mounted) -> None:
    done = run("remount", small.path, "-o", "suid,dev")
    assert (done.returncode, done.stdout) == (0, NOTHING)


def test_a_file_open_for_writing_prevents_ro_and_is_named(small: Mounted) -> None:
    with (small.path / "file").open("wb"):
        done = run("remount", small.path, "-o", "ro,promote_after=9")
        refused(done, "cannot change ro of", f"({os.getpid()})", code=1)
    assert value(small, "promote_after") == "2"


def test_flags_come_back_if_the_options_are_refused_later(small: Mounted) -> None:
    log = small.path.parent / "foreign"
    log.write_text("no access log")
    refused(run("remount", small.path, "-o", f"noexec,access_log={log}"), "is no access log")
    assert value(small, "mount_flags") == "none"


def test_kvfs_mount_f_starts_no_keeper_for_a_remount(small: Mounted) -> None:
    refused(run("mount", "-f", "-o", "remount", small.path), "leave it out of a remount")


def test_what_is_no_mount_is_not_remounted(tmp_path: Path) -> None:
    refused(run("remount", tmp_path, "-o", "promote_after=3"), "is not a mount point")
