"""The command line: what it refuses, with which exit code, and how it starts and ends a daemon."""

import errno
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvfs import runtime
from kvfs.cli import doctor, human, main, ns
from kvfs.cli import mount as mount_command
from kvfs.cli import options as set_command
from kvfs.cli import status as status_command
from kvfs.cli import umount as umount_command
from kvfs.cli.mount import GROUPS
from kvfs.cli.ns import overview
from kvfs.config import Config
from kvfs.errors import ControlError
from kvfs.mounts import MNT_DETACH, mount, umount
from kvfs.parsing import rows
from kvfs.settings import Settings

ROOT = Path(__file__).parents[2]
Requests = list[tuple[str, dict[str, object]]]

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "mountpoint": "/mnt/[kv]",
    "daemon_pid": 4711,
    "keeper_pid": 4710,
    "takeovers": 3,
    "uptime_s": 90061.5,
    "passthrough": {"on": True, "why": ""},
    "huge_pages": {"on": False, "why": "forced"},
    "shown": {"metrics": {"on": True, "why": ""}, "web": {"on": False, "why": "taken"}},
    "tiers": {
        "ram": {
            "path": "/run/kvfs-ram/mnt-kv",
            "capacity_bytes": 2 << 30,
            "used_bytes": 1 << 30,
            "reserved_bytes": 3 << 30,
            "objects": 7,
            "hits": 11,
            "state": "healthy",
            "state_s": 90061.5,
            "why": "",
        },
        "nvme": {
            "path": "/data/kvfs",
            "capacity_bytes": 100 << 30,
            "used_bytes": 3 << 20,
            "reserved_bytes": 512,
            "objects": 8,
            "hits": 13,
            "state": "down",
            "state_s": 61.0,
            "why": "disk full",
        },
    },
    "objects": 9,
    "census_done": False,
    "without_bucket": 5,
    "open_handles": 1,
    "writers": 2,
    "jobs": 3,
    "counters": {"opens_ram": 17, "mover_failures": 0},
    "errors": {
        "write": {"NoSpaceError": 7, "QuotaError": 2},
        "lookup": {"NotFoundError": 99},
    },
    "namespaces": [
        {
            "name": "[ns]",
            "problem": "no place",
            "settings": {
                "quota_hard": "1G",
                "quota_objects": "5",
                "eviction": "adaptive",
                "pin": "on",
            },
            "bytes": 1 << 20,
            "staging_bytes": 3 << 20,
            "objects": 5,
            "counters": {"read_ram": 3, "read_nvme": 4, "misses": 1, "read_bytes": 1 << 20},
            "following": "lru",
            "hit_ratio_at": {"0.5": 0.25, "1": 0.86, "2": 0.5, "4": 0.75},
        },
    ],
    "models": [
        {"engine": "lmcache", "model": f"[m{n}]\udcff", "objects": 9, "bytes": 1 << 20}
        for n in range(12)
    ],
    "hot": [{"path": "[ns]/a_b.kv", "opens": 6}, {"path": "two\nlines\udcff", "opens": 5}],
    "options": {"ram": "2G", "log_level": "info", "metrics": "127.0.0.1:9095"},
}


def kvfs(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="kvfs")


def assert_refused(result: Result, words: str, code: int = 2) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("kvfs: ")
    assert result.stderr.count("\n") == 1, "a refusal is one line"


@pytest.fixture
def dead_mount(tmp_path: Path) -> Iterator[Path]:
    """Yield a kvfs mount whose daemon is gone."""
    path = tmp_path / "dead"
    path.mkdir()
    device = os.open("/dev/fuse", os.O_RDWR)
    mount("kvfs", path, runtime.FSTYPE, 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
    os.close(device)
    yield path
    if runtime.mount_at(path):
        umount(path, MNT_DETACH)


@pytest.fixture
def daemon() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that ends when its stdin is closed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "no such command"),
        (["check"], "no such command 'check': run kvfs fsck"),
        (["events"], "read MOUNTPOINT/.kvfs/events"),
        (["df"], "run df MOUNTPOINT"),
        (["upgrade", "/mnt/kv", "-o"], "(see kvfs upgrade --help)"),
        (["--frobnicate"], "No such option"),
        (["mount"], "Missing argument 'MOUNTPOINT' (see kvfs mount --help)"),
        (["mount", ""], "the mount point is empty"),
        (["mount", "/none"], "mount point /none does not exist; mkdir -p /none"),
        (["mount", "/etc/passwd"], "mount point /etc/passwd is not a directory"),
        (["mount", "/"], "/ is already a mount point"),
        (["mount", "/proc"], "/proc is already a mount point (proc)"),
        (["mount", "/usr", "-o", "ramm=1G"], "did you mean ram?"),
        (["mount", "/usr", "-o", "ram=1G", "-o", "ram=2G"], "ram is given twice"),
        (["mount", "/usr", "-o", "ram=1G", "--frobnicate"], "No such option"),
        (["mount", "/usr", "/usr"], "unexpected extra argument"),
        (["mount", "/usr", "--foreground", "-o", "ram=1K"], "at least 16M"),
        (["umount", "/usr"], "/usr is not a mount point; mounts of kvfs: "),
        (["umount", "/proc"], "/proc is a mount of type proc, expected fuse.kvfs"),
        (["status", "/usr"], "/usr is not a mount point"),
        (["status", "/none", "--json"], "/none is not a mount point"),
        (["set", "/usr"], "Missing argument"),
        (["set", "/usr", "log_level"], "log_level: expected NAME=VALUE"),
        (["set", "/usr", "loglevel=info"], "did you mean log_level"),
        (["set", "/usr", "log_level=loud"], "one of debug, info, warning, error"),
        (["set", "/usr", "log_level=info", "log_level=info"], "given twice"),
        (["set", "/usr", "ram=2G"], "ram cannot change while mounted"),
        (["set", "/usr", "log_level=info"], "/usr is not a mount point"),
        (["doctor", "/usr"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_exit_code_2(
    arguments: list[str], words: str
) -> None:
    assert_refused(kvfs(*arguments), words)


@pytest.mark.parametrize("arguments", [("status",), ("umount",), ("fsck",), ("flush",)])
def test_a_name_in_a_refusal_moves_nothing_on_a_terminal(arguments: tuple[str, ...]) -> None:
    """A directory of another program may have this name, and a shell pattern may pass it."""
    done = kvfs(*arguments, "/tmp/\x1b]0;title\x07\x1b[2J\u202e\udcff")
    assert done.exit_code
    assert done.stderr.rstrip("\n").isprintable()
    assert "\\x1b[2J" in done.stderr


def test_a_refusal_comes_before_any_change(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    result = kvfs("mount", tmp_path / "mnt", "-o", f"nvme={tmp_path}/new,nvme_size=900T")
    assert_refused(result, "more than the device has")
    assert list(tmp_path.iterdir()) == [tmp_path / "mnt"]


def test_the_installed_script_refuses_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvfs", "umount", "/proc"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvfs: /proc is a mount of type proc, expected fuse.kvfs\n"


def test_asking_for_status_imports_no_file_system() -> None:
    script = (
        "import sys\n"
        "from kvfs.cli import main\n"
        "try: main(['status', '/proc'])\n"
        "except SystemExit: print(*({'pyfuse3', 'rocksdict', 'kvfs.daemon'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "\n"


def test_help_lists_every_command_and_every_option() -> None:
    assert all(f"\n  {name}" in kvfs("--help").stdout for name in ("mount", "umount", "doctor"))
    assert kvfs("--version").stdout.startswith("kvfs, version ")
    assert "...\n" not in kvfs("--help").stdout.partition("Commands:")[2], (
        "a first line does not fit"
    )
    shown = kvfs("mount", "--help").stdout
    assert "promote_after=  [opens; default: 2; kvfs set]" in shown
    assert "passthrough=  [auto|on|off; default: auto]" in shown
    first = re.findall(r"^    (\w+)=", shown, re.MULTILINE)[:5]
    assert first == ["ram", "nvme", "nvme_size", "s3", "allow_other"]


def test_each_mount_option_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(row.name for row in rows(Config))


# mount


@pytest.fixture
def fake_keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that puts a shell script in the keeper's place."""

    def install(script: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\ncat >"{tmp_path}/config"\n{script}\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        (tmp_path / "mnt").mkdir(exist_ok=True)
        return tmp_path / "mnt"

    return install


@pytest.mark.parametrize(
    ("script", "words", "code"),
    [
        ("""echo '{"error": "nvme=/x is locked", "exit": 2}'; exit 2""", "nvme=/x is locked", 2),
        ("""echo '{"error": "no /dev/fuse", "exit": 1}'; exit 1""", "no /dev/fuse", 1),
        ("echo Trace >&2; echo Error: x >&2; exit 1", "with 1 before it was ready: Error: x", 1),
        ("exit 0", "exited with 0 before it was ready: it said nothing", 1),
        ("kill -9 $$", "was killed by signal 9", 1),
    ],
)
def test_a_keeper_that_fails_to_start_is_a_one_line_reason(
    fake_keeper: Callable[[str], Path], script: str, words: str, code: int
) -> None:
    assert_refused(kvfs("mount", fake_keeper(script), "-o", "ram=16M"), words, code)


def test_mount_returns_when_ready_and_prints_its_features(
    fake_keeper: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mount_command, "request", lambda _mountpoint, _verb: STATUS)
    mountpoint = fake_keeper("""echo '{"ready": true}'""")
    result = kvfs("mount", mountpoint, "-o", "ram=16M", "-o", "movers=2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(
        f"{mountpoint}: passthrough on, huge pages off (forced), ram 2.0 GiB at"
    )
    config = json.loads((tmp_path / "config").read_text())
    assert (config["mountpoint"], config["movers"]) == (str(mountpoint), 2)


# umount


def answers(requests: Requests, pid: int, left: Iterator[int]) -> Callable[..., dict[str, Any]]:
    def request(_mountpoint: Path, verb: str, **arguments: object) -> dict[str, Any]:
        requests.append((verb, arguments))
        if verb == "write_back":
            return {"bytes_left": next(left), "objects_left": 1}
        return {"daemon_pid": 1, "keeper_pid": pid}

    return request


@pytest.mark.parametrize("flag", [[], ["--now"], ["--lazy"]])
def test_a_mount_with_a_dead_daemon_is_unmounted(dead_mount: Path, flag: list[str]) -> None:
    result = kvfs("umount", dead_mount, *flag)
    assert result.exit_code == 0, result.stderr
    assert "unmounting without the daemon's help" in result.stderr
    assert runtime.mount_at(dead_mount) is None


def test_a_daemon_that_hangs_does_not_prevent_a_lazy_unmount(tmp_path: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        mount("kvfs", tmp_path, runtime.FSTYPE, 0, options)
        assert kvfs("umount", "--lazy", "--now", tmp_path).exit_code == 0
        assert runtime.mount_at(tmp_path) is None
    finally:
        os.close(device)
        if runtime.mount_at(tmp_path):
            umount(tmp_path, MNT_DETACH)


def test_an_unmount_saves_first_and_waits_for_the_daemon(
    dead_mount: Path, daemon: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: Requests = []
    request = answers(requests, daemon.pid, iter([3 << 20, 1 << 20, 0]))
    monkeypatch.setattr(umount_command, "request", request)
    monkeypatch.setattr(umount_command, "POLL_S", 0)
    unmount = umount_command._unmount

    def unmount_and_end(mountpoint: Path, *, lazy: bool) -> None:
        unmount(mountpoint, lazy=lazy)
        if daemon.stdin:
            daemon.stdin.close()

    monkeypatch.setattr(umount_command, "_unmount", unmount_and_end)
    result = kvfs("umount", dead_mount)
    assert result.exit_code == 0, result.stderr
    assert [verb for verb, _ in requests] == ["status", "write_back", "write_back", "write_back"]
    assert daemon.wait(0) == 0
    assert runtime.mount_at(dead_mount) is None


def test_an_unmount_that_cannot_save_leaves_the_mount(
    dead_mount: Path, daemon: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umount_command, "request", answers([], daemon.pid, iter([5, 5, 5])))
    monkeypatch.setattr(umount_command, "POLL_S", 0)
    monkeypatch.setattr(umount_command, "STALLED_S", -1)
    assert_refused(kvfs("umount", dead_mount), "5 B are only in RAM", code=1)
    assert runtime.mount_at(dead_mount)


def test_a_daemon_that_does_not_end_is_reported(
    dead_mount: Path, daemon: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umount_command, "request", answers([], daemon.pid, iter([])))
    monkeypatch.setattr(umount_command, "EXIT_S", 0)
    assert_refused(kvfs("umount", "--now", dead_mount), "its daemon has not ended", code=1)


def test_ns_list_shows_how_far_the_estimates_are() -> None:
    (one,) = STATUS["namespaces"]
    early = one | {"hit_ratio_at": {}, "hit_ratio_sample": {"seen": 120, "needed": 400}}
    console = Console(width=200)
    with console.capture() as text:
        console.print(overview([early]), overview([one]))
    lines = text.get().splitlines()
    assert lines[0].index("at x1") < lines[1].index("120 of 400") + len("120 of 400")
    assert lines[1].index("120 of 400") < lines[0].index("x0.5")
    assert "120" not in lines[3]


def test_ns_show_adds_the_opens_that_other_nodes_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = runtime.MountEntry("/", "/mnt/kv", runtime.FSTYPE, "kvfs", ())
    monkeypatch.setattr(runtime, "mounts", lambda *_: [mounted])
    (one,) = STATUS["namespaces"]

    def shown(**counters: int) -> str:
        found = one | {"own": True, "problem": "", "capacity_objects": 9, "models": [], "tiers": {}}
        found |= {"counters": counters, "settings": Settings().to_text()}
        monkeypatch.setattr(ns, "request", lambda *_, **__: found)
        return " ".join(kvfs("ns", "show", "/mnt/kv/chat").stdout.split())

    assert "hit ratio 50.0% estimated at 0.5 x 9 objects 25.0% " in shown(read_ram=5, misses=5)
    text = shown(read_ram=5, read_pool=4, misses=1)
    assert "hit ratio 50.0%, with other nodes 90.0% " in text
    assert "estimated at 0.5 x 9 objects 25.0%, with other nodes 85.0% " in text


def test_busy_mount_names_its_users(tmp_path: Path) -> None:
    mount("none", tmp_path, "tmpfs", 0, "size=1M")
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tmp_path) as other:
            with (tmp_path / "open").open("wb"), pytest.raises(Exception, match="busy") as refusal:
                umount_command._unmount(tmp_path, lazy=False)
            other.communicate()
        assert f"is busy; in use by cat ({other.pid}); or" in str(refusal.value), "not this process"
    finally:
        umount(tmp_path)


def test_a_namespace_is_right_below_its_mount_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = runtime.MountEntry("/", "/mnt/kv", runtime.FSTYPE, "kvfs", ())
    monkeypatch.setattr(runtime, "mounts", lambda *_: [mounted])
    result = kvfs("ns", "show", "/mnt/kv/chat/sub")
    assert_refused(result, "expected a directory right below /mnt/kv, or /mnt/kv itself")
    monkeypatch.setattr(runtime, "mounts", lambda *_: [])
    assert_refused(
        kvfs("ns", "show", "chat"), "namespace chat: no kvfs is mounted; run kvfs mount "
    )


# status and set


def test_status_shows_tiers_and_reasons(monkeypatch: pytest.MonkeyPatch, dead_mount: Path) -> None:
    monkeypatch.setattr(status_command, "request", lambda _mountpoint, _verb: STATUS)
    result = kvfs("status", dead_mount)
    assert result.exit_code == 0, result.stderr
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "mount point /mnt/[kv]" in shown
    assert "daemon pid 4711, up 1 d 01:01:01" in shown
    assert "keeper pid 4710, 3 takeovers" in shown
    assert "passthrough on" in shown
    assert "huge pages off: forced" in shown
    assert "metrics at 127.0.0.1:9095" in shown
    assert "web off now: taken" in shown
    assert "objects 9 (still counting)" in shown
    assert "ram 2.0 GiB 1.0 GiB 1.0 GiB 7 11 healthy /run/kvfs-ram/mnt-kv" in shown
    assert "nvme 100.0 GiB 3.0 MiB 512 B 8 13 down for 0 d 00:01:01: disk full /data/kvfs" in shown
    assert "opens ram 17" in shown
    assert "refused ENOSPC 7, EDQUOT 2, EIO 0" in shown
    counted = "[ns] 5 1.0 MiB 3.0 MiB 100.0% of 1G, 5 objects 7 1 87.5% 86.0% 25.0% 50.0% 75.0%"
    assert f"{counted} adaptive (lru), pin" in shown
    assert "namespace [ns]: no place" in shown
    assert "lmcache [m9]\\udcff 9 1.0 MiB" in shown
    assert "and 2 more models: see --json" in shown
    assert "opens of [ns]/a_b.kv 6" in shown
    assert "opens of two\\nlines\\udcff 5" in shown


def test_status_without_errors_has_no_line_for_them(
    monkeypatch: pytest.MonkeyPatch, dead_mount: Path
) -> None:
    healthy = STATUS | {"errors": {"lookup": {"NotFoundError": 99}}}
    monkeypatch.setattr(status_command, "request", lambda _mountpoint, _verb: healthy)
    assert "refused" not in kvfs("status", dead_mount).stdout


def test_status_json_is_the_answer_of_the_daemon(
    monkeypatch: pytest.MonkeyPatch, dead_mount: Path
) -> None:
    monkeypatch.setattr(status_command, "request", lambda _mountpoint, _verb: STATUS)
    assert json.loads(kvfs("status", "--json", dead_mount).stdout) == STATUS


def test_status_of_a_dead_daemon_names_the_cure(dead_mount: Path) -> None:
    result = kvfs("status", dead_mount)
    assert_refused(result, "Run this as the mounting user (user_id=0) in the same container", 1)
    assert f"were deleted: kvfs umount {dead_mount}" in result.stderr


def test_upgrade_of_a_dead_daemon_names_the_cure(dead_mount: Path) -> None:
    assert_refused(kvfs("upgrade", dead_mount), "Run this as the mounting user (user_id=0)", 1)


def test_set_hands_all_settings_over_at_once(
    monkeypatch: pytest.MonkeyPatch, dead_mount: Path
) -> None:
    requests: Requests = []
    monkeypatch.setattr(set_command, "request", answers(requests, 0, iter([])))
    assert kvfs("set", dead_mount, "promote_after=3", "log_level=debug").exit_code == 0
    assert requests == [("set", {"promote_after": "3", "log_level": "debug"})]


def test_a_daemon_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, dead_mount: Path) -> None:
    def refuse(*_: object, **__: object) -> dict[str, Any]:
        raise ControlError("not\nnow")

    monkeypatch.setattr(set_command, "request", refuse)
    assert_refused(kvfs("set", dead_mount, "promote_after=3"), "not now", code=1)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_sizes_are_shown_as_people_read_them(size: int, text: str) -> None:
    assert human(size) == text


# doctor


def test_doctor_tries_passthrough_and_huge_pages_for_real() -> None:
    result = kvfs("doctor", "--json")
    report = json.loads(result.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) == {
        "kernel", "/dev/fuse", "libfuse", "privileges", "fusermount3", "passthrough", "huge pages",
        "memory", "python packages", "C extension", "pool",
    }  # fmt: skip
    assert all(check["verdict"] in {"ok", "degraded", "missing"} for check in checks.values())
    assert all(bool(check["cure"]) == (check["verdict"] != "ok") for check in checks.values())
    assert report["ok"] == all(check["verdict"] == "ok" for check in checks.values())
    assert result.exit_code == (0 if report["ok"] else 1)
    assert checks["passthrough"]["found"] == "tried, works" or checks["passthrough"]["cure"]
    assert not [mount for mount in runtime.mounts() if "kvfs-probe-" in mount.path]


def test_doctor_names_the_cure_of_each_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_privileged", lambda: False)
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-18-amd64")
    monkeypatch.setattr(doctor, "LIBFUSE", (99, 0))
    monkeypatch.setattr(doctor, "SMALL_MEMORY", 1 << 60)
    monkeypatch.setenv("PATH", "/none")
    result = kvfs("doctor")
    assert result.exit_code == 1
    shown = " ".join(result.stdout.split())
    assert "degraded kernel Linux 6.1.0-18-amd64 cure: boot Linux 6.9" in shown
    assert "missing libfuse" in shown
    assert "degraded passthrough not tried: needs CAP_SYS_ADMIN" in shown
    assert "degraded memory" in shown
    assert "missing fusermount3 not installed cure: apt-get install fuse3" in shown


def test_doctor_asks_for_nothing_that_only_a_pool_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"nginx 1\.\d+\.\d+, redis \d+\.\S+", doctor._pool().found)

    def refuse(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", refuse)
    lacks = "no Python package redis: pip install 'kvfs[pool]'; only the option pool needs it"
    assert doctor._pool() == ("pool", "ok", lacks, "")
    monkeypatch.setattr("kvfs.pool.nginx.PROGRAM", "nginx-none")
    assert doctor._pool().found.startswith("nginx-none is missing, ")
    assert doctor._pool().verdict == "ok"


def test_doctor_does_not_begin_with_a_chmod(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        check = doctor._device()
    assert check.verdict == "missing"
    assert check.cure.startswith("use sudo; ")


def test_doctor_expects_only_the_packages_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["click>=8.2", 'none-1; python_version < "3.4"', 'none-2; extra == "test"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    assert doctor._packages().verdict == "ok"
    wanted.append('none-3; python_version < "9.9"')
    assert doctor._packages().found == "no none-3"


def test_doctor_says_why_it_could_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/none")
    assert "could not try" in doctor._probe()["passthrough"]


# mount.kvfs, as mount(8) runs it


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """Return mount.kvfs as installed: a link to a checkout, whose kvfs prints its arguments."""
    checkout = tmp_path / "check out"
    for name in ("mount", ".venv/bin"):
        (checkout / name).mkdir(parents=True)
    script = (ROOT / "mount/mount.kvfs").read_text()
    for name, text in (
        (".venv/bin/kvfs", '#!/bin/sh\nprintf "<%s>" "$@"\n'),
        ("mount/mount.kvfs", script),
    ):
        (checkout / name).write_text(text)
        (checkout / name).chmod(0o755)
    link = tmp_path / "mount.kvfs"
    link.symlink_to(checkout / "mount/mount.kvfs")
    return link


@pytest.mark.parametrize(
    ("arguments", "handed_over"),
    [
        (["kvfs", "/mnt/k v"], "<mount><-o><><--></mnt/k v>"),
        (["kvfs", "/kv", "-o", "rw,ram=1G"], "<mount><-o><rw,ram=1G><--></kv>"),
        (["kvfs", "/kv", "-sv", "-n", "-o", "a", "-o", "$(x) *"], "<mount><-o><a,$(x) *><--></kv>"),
        (["-o", "ro", "-t", "kvfs", "none", "/kv"], "<mount><-o><ro><--></kv>"),
        (["kvfs", "/kv", "-f", "-o", "ro"], ""),
        (["kvfs", "/kv", "-vf"], ""),
    ],
)
def test_mount_kvfs_hands_over(helper: Path, arguments: list[str], handed_over: str) -> None:
    done = subprocess.run([helper, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == handed_over


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected SPEC and DIR, got 0 words"),
        (["kvfs"], "expected SPEC and DIR, got 1 words"),
        (["kvfs", "/kv", "/kv"], "expected SPEC and DIR, got 3 words"),
        (["kvfs", "/kv", "-o"], "-o needs a value"),
        (["kvfs", "/kv", "-x"], "unknown option -x"),
        (["kvfs", "/kv", "-vx"], "unknown option -vx"),
        (["kvfs", "/kv", "--verbose"], "unknown option --verbose"),
        (["kvfs", "/kv", "-N", "1"], "-N is not supported"),
        (["kvfs", "/kv", "-t", "ext4"], "type ext4: expected kvfs"),
    ],
)
def test_mount_kvfs_refuses(helper: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run([helper, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_mount_kvfs_says_when_kvfs_is_not_installed(helper: Path) -> None:
    (helper.resolve().parents[1] / ".venv/bin/kvfs").unlink()
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [helper, "kvfs", "/kv"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert "/kvfs is not installed; install kvfs again, then run kvfs setup" in done.stderr


def test_upgrade_names_all_that_it_can_change() -> None:
    text = " ".join(kvfs("upgrade", "--help").output.split())
    alone, _, hot = text.partition("Options that can change with it: ")[2].partition("; and what")
    assert {"ram", "metrics", "web", "log"} <= set(alone.split(", "))
    assert "access_log" in hot
    assert not {"passthrough", "nvme"} & set(alone.split(", "))
