"""The keeper: daemons that die, hang or are replaced, and its messages to systemd."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import runtime
from kvfs.catalog import FORMAT
from kvfs.control import request, request_keeper
from kvfs.control.channel import PROTOCOL
from kvfs.errors import ControlError
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, alive, wait_for

MIB = 1 << 20


def keeper(kv: Mounted) -> dict[str, Any]:
    return request_keeper(kv.path, "status")


def kvfs(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*KVFS, *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def movers_of(daemon: int) -> list[int]:
    """The other processes of a daemon's group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            group = (process / "stat").read_text().rsplit(")", 1)[1].split()[2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == daemon and int(process.name) != daemon:
            found.append(int(process.name))
    return found


def cause(kv: Mounted) -> str:
    """The reason of the last takeover, as the events tell it."""
    events = [json.loads(line) for line in (kv.path / ".kvfs/events").read_text().splitlines()]
    found: str = next(one["why"] for one in reversed(events) if one["kind"] == "takeover")
    return found


# Deaths


@pytest.mark.parametrize("standby", [True, False])
def test_open_files_survive_the_death_of_the_daemon(either: Mounted, *, standby: bool) -> None:
    """There is a loaded standby, or one that dies at the same time."""
    kv = either
    (kv.path / "sealed").write_bytes(b"s" * MIB)
    reader = os.open(kv.path / "sealed", os.O_RDONLY)
    writer = os.open(kv.path / "staging", os.O_CREAT | os.O_RDWR)
    nameless = os.open(kv.path / "nameless", os.O_CREAT | os.O_RDWR)
    os.unlink(kv.path / "nameless")
    for number in range(3):
        os.write(writer, b"%d" % number)
        os.write(nameless, b"%d" % number)
        wait_for(lambda: keeper(kv)["standby_loaded"], "the standby is loaded")
        if not standby:
            kv.allow_log("the standby daemon was killed")
            kv.allow_log("takeover failed .* was killed by SIGKILL")  # by the standby
            os.kill(keeper(kv)["standby_pid"], signal.SIGKILL)
        kv.kill_daemon()
        assert os.pread(reader, 2 * MIB, 0) == b"s" * MIB
        assert (kv.path / "sealed").read_bytes() == b"s" * MIB
    status = kv.status()
    assert (status["open_handles"], status["writers"], status["takeovers"]) == (3, 2, 3)
    assert os.pread(nameless, 10, 0) == b"012"
    for descriptor in (reader, writer, nameless):
        os.close(descriptor)
    assert (kv.path / "staging").read_bytes() == b"012"
    assert sorted(os.listdir(kv.path)) == ["sealed", "staging"]


def test_a_request_that_waits_is_answered_by_the_next_daemon(kv: Mounted) -> None:
    (kv.path / "a").write_bytes(b"a" * MIB)
    daemon = kv.pid
    os.kill(daemon, signal.SIGSTOP)
    read: list[bytes] = []
    client = threading.Thread(target=lambda: read.append((kv.path / "a").read_bytes()))
    client.start()
    kv.allow_log("was killed by SIGKILL")
    os.kill(daemon, signal.SIGKILL)
    client.join(PATIENCE)
    assert read == [b"a" * MIB]


def test_bytes_written_after_the_death_of_the_daemon_are_sealed(kv: Mounted) -> None:
    writer = os.open(kv.path / "a", os.O_CREAT | os.O_RDWR)
    os.write(writer, b"before")
    os.kill(kv.pid, signal.SIGKILL)
    kv.allow_log("was killed by SIGKILL")
    os.write(writer, b" after")
    os.close(writer)
    assert (kv.path / "a").read_bytes() == b"before after"
    kv.remount()
    assert (kv.path / "a").read_bytes() == b"before after"


def test_an_exception_is_a_death_like_others(kv: Mounted) -> None:
    (kv.path / "a").write_bytes(b"a")
    before = kv.status()["takeovers"]
    kv.expect_log("SIGABRT")
    os.kill(kv.pid, signal.SIGABRT)
    wait_for(lambda: kv.status()["takeovers"] > before, "another one serves")
    assert (kv.path / "a").read_bytes() == b"a"


def test_movers_of_a_dead_daemon_are_gone(kv: Mounted) -> None:
    for number in range(16):
        (kv.path / f"{number}.kv").write_bytes(os.urandom(12 * MIB))
    wait_for(lambda: kv.status()["counters"]["demoted"], "movers have worked")
    daemon = kv.pid
    assert movers_of(daemon)
    kv.kill_daemon()
    wait_for(lambda: not movers_of(daemon), "no mover is left")
    kv.idle()


def test_a_dead_mover_is_replaced(kv: Mounted) -> None:
    kv.allow_log("a mover died")
    kv.allow_log("resource_tracker: process died")  # it is of their group
    for number in range(16):
        (kv.path / f"{number}.kv").write_bytes(bytes([number]) * 12 * MIB)
    daemon = kv.pid
    for mover in wait_for(lambda: movers_of(daemon), "there are movers"):
        os.kill(mover, signal.SIGKILL)
    kv.idle()
    for number in range(16):
        assert (kv.path / f"{number}.kv").read_bytes() == bytes([number]) * 12 * MIB
    assert kv.status()["takeovers"] == 0


def test_a_daemon_that_stops_answering_is_replaced(mount: Mount) -> None:
    kv = mount("ram=64M,watchdog=1")
    (kv.path / "a").write_bytes(b"a")
    kv.expect_log(r"has not answered for [0-9.]+ s")
    kv.expect_log("was killed by SIG(ABRT|KILL)")
    daemon = kv.pid
    os.kill(daemon, signal.SIGSTOP)
    assert (kv.path / "a").read_bytes() == b"a"  # waits for the next daemon
    # Not == 1: a busy machine may keep that one from speaking for a second, too.
    wait_for(lambda: kv.status()["takeovers"] >= 1, "another one serves")
    assert not alive(daemon)
    assert re.fullmatch(
        r"daemon \d+ was killed by SIG(ABRT|KILL), after [0-9.]+ s without an answer", cause(kv)
    )


def test_the_daemon_dies_while_an_unmount_writes_back(kv: Mounted) -> None:
    for number in range(10):
        (kv.path / f"{number}.kv").write_bytes(bytes([number]) * 8 * MIB)
    daemon = kv.pid
    kv.allow_log("was killed by SIGKILL")
    subprocess.run(["umount", kv.path], check=True)
    if alive(daemon):
        os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    kv.mount()
    for number in range(10):
        assert (kv.path / f"{number}.kv").read_bytes() == bytes([number]) * 8 * MIB


def test_without_a_keeper_the_mount_goes_on(kv: Mounted) -> None:
    daemon = kv.pid
    os.kill(kv.keeper, signal.SIGKILL)
    kv.expect_log("the keeper of .* is dead")
    wait_for(lambda: not alive(kv.keeper), "the keeper is gone")
    (kv.path / "a").write_bytes(b"a")
    assert kv.status()["keeper_pid"] == 0
    refused = kvfs("upgrade", kv.path)
    assert refused.returncode == 1
    assert "no keeper answers" in refused.stderr
    kv.umount()
    wait_for(lambda: not alive(daemon), "the daemon ends")
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"a"


def test_a_mount_without_keeper_and_daemon_is_dead(kv: Mounted) -> None:
    pids = kv.keeper, kv.pid
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    kv.allow_log("the keeper of .* is dead")
    kv.expect_log("the last session did not end properly")
    wait_for(lambda: not any(map(alive, pids)), "both are gone")
    (one,) = (
        each
        for each in json.loads(kvfs("mounts", "--json").stdout)
        if each["mountpoint"] == str(kv.path)
    )
    assert one["state"] == "dead"
    assert one["problem"].endswith(f"if its daemon has died: kvfs umount {kv.path}")
    rows = [line.split()[-6:] for line in kvfs("mounts").stdout.splitlines()]
    assert ["dead", *["-"] * 5] in rows
    done = kvfs("umount", kv.path)
    alone, memory = done.stderr.splitlines()
    assert done.returncode == 0
    assert alone == (
        "kvfs: unmounting without the daemon's help: no daemon answers ([Errno 111] "
        "Connection refused)"
    )
    assert " stays for the next mount, with what only RAM has; to remove it: kvfs umount" in memory
    kv.mount()


def test_a_mount_that_no_daemon_can_serve_is_given_up(kv: Mounted) -> None:
    """The session file, for example, is not this mount's."""
    (kv.path / "a").write_bytes(b"a" * MIB)
    session = runtime.runtime_dir(kv.path) / "session"
    content = session.read_bytes()[:8192]
    other = content.rstrip(b"\0").replace(os.fsencode(kv.path), b"/elsewhere")
    kv.expect_log("takeover failed .*session file .* does not fit")
    kv.expect_log("given up after 8 daemons died in a row .the last: session file")
    kv.allow_log("was killed by SIGKILL")
    with session.open("r+b") as file:
        file.write(other.ljust(8192, b"\0"))
    os.kill(kv.pid, signal.SIGKILL)
    wait_for(lambda: not alive(kv.keeper), "the keeper gives up")
    assert runtime.mount_at(kv.path) is None
    kv.expect_log("did not end properly: its bytes are all there")
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"a" * MIB


def test_a_second_keeper_is_refused(kv: Mounted) -> None:
    config = (runtime.runtime_dir(kv.path) / "config").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.keeper"],
        input=config,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    reason = json.loads(done.stdout)["error"]
    assert reason.startswith(f"{kv.path} belongs to another kvfs (process {kv.keeper})")
    (kv.path / "a").write_bytes(b"still served")


def test_mount_over_a_detached_one_names_the_process_that_uses_it(kv: Mounted) -> None:
    with (kv.path / "a").open("wb"):
        assert kvfs("umount", "--lazy", kv.path).returncode == 0
        done = kvfs("mount", kv.path, "-o", "ram=64M")
        assert done.returncode == 2
        assert f"its kvfs (process {kv.keeper}) serves it until" in done.stderr
        assert f"{Path('/proc/self/comm').read_text().strip()} ({os.getpid()})" in done.stderr
    wait_for(lambda: not alive(kv.keeper), "it ends with that file")
    kv.mount()


def test_a_hangup_changes_nothing(kv: Mounted) -> None:
    for pid in (kv.keeper, kv.pid):
        os.kill(pid, signal.SIGHUP)
    os.kill(kv.pid, signal.SIGTERM)  # the keeper is who unmounts
    (kv.path / "a").write_bytes(b"a")
    assert kv.status()["takeovers"] == 0


def test_options_of_kvfs_set_outlive_the_daemon(kv: Mounted) -> None:
    assert kvfs("set", kv.path, "promote_after=7").returncode == 0
    kv.kill_daemon()
    assert kv.status()["options"]["promote_after"] == "7"


def test_a_lost_configuration_is_no_reason_to_die(kv: Mounted) -> None:
    (runtime.runtime_dir(kv.path) / "config").unlink()
    kv.expect_log("options that were set since the mount are lost")
    kv.kill_daemon()
    (kv.path / "a").write_bytes(b"a")


# Upgrades


def test_an_upgrade_keeps_everything(kv: Mounted) -> None:
    (kv.path / "a").write_bytes(b"a" * MIB)
    reader = os.open(kv.path / "a", os.O_RDONLY)
    writer = os.open(kv.path / "b", os.O_CREAT | os.O_RDWR)
    os.write(writer, b"before")
    before = kv.pid
    done = kvfs("upgrade", kv.path, "-o", "ram=128M,movers=1,promote_after=9")
    assert done.returncode == 0, done.stderr
    assert "kvfs 0.1.0 -> 0.1.0" in done.stdout
    status = kv.status()
    assert status["daemon_pid"] != before
    assert cause(kv) == "upgrade from kvfs 0.1.0 to 0.1.0"
    assert status["tiers"]["ram"]["capacity_bytes"] == 128 * MIB
    assert status["options"]["promote_after"] == "9"
    os.write(writer, b" after")
    os.close(writer)
    assert os.pread(reader, MIB, 0) == b"a" * MIB
    os.close(reader)
    assert (kv.path / "b").read_bytes() == b"before after"
    kv.kill_daemon()
    assert kv.status()["options"]["movers"] == "1", "what the upgrade changed stays"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("passthrough=off", "kvfs upgrade cannot change passthrough=off of /"),
        (
            "nvme=/other,allow_other=on",
            "kvfs upgrade cannot change allow_other=on, nvme=/other of /",
        ),
        ("ram=1T", "more than the memory"),
        ("frobnicate=1", "unknown option 'frobnicate'"),
    ],
)
def test_an_upgrade_with_other_options_is_refused(kv: Mounted, options: str, words: str) -> None:
    before = kv.status()
    done = kvfs("upgrade", kv.path, "-o", options)
    assert done.returncode == 2
    assert words in done.stderr
    assert kv.status()["daemon_pid"] == before["daemon_pid"]


def test_upgrade_without_a_mount_is_refused(tmp_path: Path) -> None:
    done = kvfs("upgrade", tmp_path)
    assert done.returncode == 2
    assert "is not a mount point" in done.stderr


SPEAK = """
import json, socket, sys, time
keeper = socket.socket(fileno=int(sys.argv[1]))
def say(**what): keeper.send(json.dumps(what).encode())
"""


@pytest.fixture
def upgrade_to(kv: Mounted) -> Iterator[Callable[[str], str]]:
    """`upgrade_to(code)` upgrades to a daemon that runs this code; returns why it failed."""

    def upgrade(code: str) -> str:
        config = json.loads((runtime.runtime_dir(kv.path) / "config").read_text())
        with pytest.raises(ControlError) as failed:
            request_keeper(
                kv.path,
                "upgrade",
                patience=PATIENCE,
                command=[sys.executable, "-c", SPEAK + code],
                config=config,
            )
        return str(failed.value)

    (kv.path / "a").write_bytes(b"a" * MIB)
    yield upgrade
    assert (kv.path / "a").read_bytes() == b"a" * MIB
    (kv.path / "b").write_bytes(b"b")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            f"say(what='loaded', version='0.0', protocol={PROTOCOL}, format=0)\nkeeper.recv(9)",
            f"reads catalogs up to format 0, this one has format {FORMAT}: nothing is changed",
        ),
        (
            f"say(what='loaded', version='9.9', protocol=99, format={FORMAT})\nkeeper.recv(9)",
            "kvfs 9.9 needs another keeper (protocol 99",
        ),
        ("sys.exit(7)", "the daemon exited with 7 before it was loaded"),
        ("say(what='error', error='no such machine', exit=1)\nkeeper.recv(9)", "no such machine"),
    ],
)
def test_a_version_that_does_not_fit_is_refused(
    kv: Mounted, upgrade_to: Callable[[str], str], code: str, words: str
) -> None:
    before = kv.pid
    assert words in upgrade_to(code)
    assert kv.pid == before, "nothing is changed"


LOADED = f"say(what='loaded', version='9.9', protocol={PROTOCOL}, format={FORMAT})\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("keeper.recv(99999); sys.exit(3)", "exited with 3 before it was prepared"),
        ("keeper.recv(99999); say(what='prepared'); keeper.recv(99); sys.exit(4)", "exited with 4"),
        ("keeper.recv(99999); keeper.recv(99)", "was not prepared within 10 s"),
    ],
)
def test_a_version_that_does_not_serve_is_rolled_back(
    kv: Mounted, upgrade_to: Callable[[str], str], code: str, words: str
) -> None:
    kv.expect_log("upgrade to kvfs 9.9 failed")
    reason = upgrade_to(LOADED + code)
    assert words in reason
    assert "kvfs 0.1.0 serves again" in reason
    assert cause(kv).startswith("upgrade to kvfs 9.9 failed: ")


# systemd


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Callable[[], dict[str, str]]]:
    """`told()` is the next message to systemd by a kvfs that was started with NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE)

        def receive() -> dict[str, str]:
            lines = systemd.recv(1000).decode().splitlines()
            return dict(line.split("=", 1) for line in lines)

        yield receive


@pytest.fixture
def foreground(
    tmp_path: Path,
    told: Callable[[], dict[str, str]],  # noqa: ARG001 (whose socket must be there first)
) -> Iterator["subprocess.Popen[str]"]:
    """Start a service on tmp_path / "kv", as systemd would."""
    (tmp_path / "kv").mkdir()
    options = f"ram=64M,log={tmp_path}/log"
    with subprocess.Popen(
        [*KVFS, "mount", "-f", tmp_path / "kv", "-o", options],
        env=os.environ | {"NOTIFY_SOCKET": f"{tmp_path}/notify", "WATCHDOG_USEC": "200000"},
        stdout=subprocess.PIPE,
        text=True,
    ) as service:
        yield service
        if service.poll() is None:
            service.terminate()
            service.wait(PATIENCE)


def test_systemd_is_told(
    tmp_path: Path, told: Callable[[], dict[str, str]], foreground: "subprocess.Popen[str]"
) -> None:
    path = tmp_path / "kv"
    assert told()["READY"] == "1"
    assert foreground.stdout is not None
    assert foreground.stdout.readline() == f"{path}: mounted\n"
    for _ in range(3):
        assert told()["WATCHDOG"] == "1"
    assert request(path, "status")["keeper_pid"] == foreground.pid, "it is the main process"
    foreground.send_signal(signal.SIGTERM)
    while told().get("STOPPING") != "1":
        pass
    assert foreground.wait(PATIENCE) == 0
    assert runtime.mount_at(path) is None
    assert not runtime.runtime_dir(path).exists()


def test_systemd_hears_that_the_keeper_lives_while_a_daemon_is_waited_for(
    tmp_path: Path, told: Callable[[], dict[str, str]], foreground: "subprocess.Popen[str]"
) -> None:
    """Otherwise systemd would kill the keeper, and the mount with it, for a slow daemon."""
    path, may_end = tmp_path / "kv", tmp_path / "may-end"
    assert told()["READY"] == "1"
    config = json.loads((runtime.runtime_dir(path) / "config").read_text())
    wait = f"import os\nwhile not os.path.exists({str(may_end)!r}): time.sleep(0.01)\nsys.exit(3)"
    command = [sys.executable, "-c", SPEAK + LOADED + wait]
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(runtime.keeper_path(path)))
        arguments = {"command": command, "config": config}
        line = json.dumps({"verb": "upgrade", "arguments": arguments})
        asked.sendall(f"{line}\n".encode())
        while told().get("RELOADING") != "1":
            pass
        for _ in range(3):
            assert told()["WATCHDOG"] == "1"
        may_end.touch()
        while told().get("READY") != "1":
            pass
        with asked.makefile() as answer:
            assert "exited with 3 before it was prepared" in answer.read()
    assert request(path, "status")["takeovers"] == 1, "the former version is back"
    assert foreground.poll() is None


def test_a_refusal_in_the_foreground_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    nvme = tmp_path / "file"
    nvme.write_text("")
    done = kvfs("mount", "-f", tmp_path / "kv", "-o", f"ram=64M,log={tmp_path}/l,nvme={nvme}/x")
    assert done.returncode == 2
    assert done.stderr.startswith("kvfs: ")
    assert done.stderr.count("\n") == 1


# Locks of the dead


def test_a_thread_that_waits_in_the_kernel_keeps_no_lock(mount: Mount) -> None:
    """To forget a name the kernel takes its directory's lock, which a creating process may hold."""
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    kv.expect_log("is gone")
    kv.expect_log("closed its channel")
    (kv.path / "lost").write_bytes(b"lost")
    kv.idle()
    inode = (kv.path / "lost").stat().st_ino
    for file in (kv.path.parent / "nvme" / "objects").rglob(f"{inode:x}.*"):
        file.unlink()
    request(kv.path, "arm", faults="tiers.create=delay:8@1")
    creator = threading.Thread(target=(kv.path / "new").write_bytes, args=(b"new",))
    creator.start()
    wait_for(
        lambda: request(kv.path, "status")["tiers"]["nvme"]["reserved_bytes"], "a create is waiting"
    )
    with pytest.raises(FileNotFoundError):
        (kv.path / "lost").read_bytes()  # dropped, and the kernel is to be told
    daemon = kv.pid
    wait_for(lambda: "D" in states(daemon), "the thread waits for the directory")
    os.kill(daemon, signal.SIGKILL)
    creator.join(PATIENCE)
    assert (kv.path / "new").read_bytes() == b"new"
    assert kv.status()["takeovers"] == 1
    wait_for(lambda: not alive(daemon), "nothing is left of the dead daemon")
    assert os.listdir(kv.path) == ["new"]


def states(pid: int) -> set[str]:
    """The states of a process's threads."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found.add((thread / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return found
