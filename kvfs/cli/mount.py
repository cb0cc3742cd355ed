"""`kvfs mount`: check everything, start the keeper, return when the mount answers.

The keeper gets the finished configuration on its stdin, as JSON. It says on its stdout, in one
line, that it is ready, or the reason for its failure. Not for the later work of the keeper.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from kvfs import runtime
from kvfs.cli import completion, excess, human, mountpoint_argument, printable
from kvfs.cli.detached import Detached, detached
from kvfs.config import FLAGS, OPTIONS, Config, option_words
from kvfs.control import request, request_keeper
from kvfs.errors import ConfigError, ControlError, KvfsError
from kvfs.parsing import kinds_of, rows

USAGE_ERROR = 2
NOTICE_S = 1.0  # in which a daemon notices that it is unmounted
EXIT_S = 60.0  # for a daemon that saves objects of RAM after that
POLL_S = 0.1
SERVER_S = 10.0  # for the server of a pool to start
FIRST = {"lock", "lost+found"}  # names in a tier's directory before its first mount
TMPFS = 0x01021994  # f_type of statfs(2): linux/magic.h


# In the order of a reader: the few that most mounts need come first.
GROUPS = {
    "Most needed": ("ram", "nvme", "nvme_size", "s3", "allow_other"),
    "Bucket": tuple(row.name for row in rows(Config) if row.name.startswith("s3_")),
    "Pool": tuple(row.name for row in rows(Config) if row.name.startswith("pool")),
    "Speed": (
        "passthrough",
        "fast_open",
        "huge",
        "movers",
        "promote_after",
        "reclaimable",
        "entry_timeout",
    ),
    "Sharing": ("namespaces", "bandwidth", "nvme_writes"),
    "Damage": ("verify_after", "scrub", "watchdog"),
    "Watching": ("metrics", "web", "log", "log_level", "access_log", "access_log_size"),
    "Kernel": ("mount_flags",),
}


def _options_help() -> str:
    """Return the help with each name on a line of its own, so that columns do not touch."""
    by_name = {row.name: row for row in rows(Config)}
    kinds = kinds_of(Config)
    lines = []
    for title, names in GROUPS.items():
        lines.append(f"{title}:")
        for row in map(by_name.__getitem__, names):
            change = "; kvfs set" if row.hot else "; kvfs upgrade" if row.upgrade else ""
            unit = "|".join(kinds[row.name].words) or row.unit
            given = "FLAG" if row.name == "mount_flags" else f"{row.name}="
            lines += [
                f"  {given}  [{unit}; default: {row.default}{change}]",
                f"      {row.meaning}",
            ]
    note = (
        "Sizes are 512M, 2G, 1.5T: powers of 1024, with B and iB as well (64M = 64MB = 64MiB).\n"
        "'kvfs set' changes an option while mounted, 'kvfs upgrade' with a new daemon. All other\n"
        "options need a new mount."
    )
    return "\b\n" + "\n".join([*lines, note])


@click.command(epilog=_options_help())
@mountpoint_argument
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTION[=VALUE],...",
    help="Mount options, listed below.",
    shell_complete=completion.options(OPTIONS, FLAGS),
)
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground until unmounted.")
def command(mountpoint: Path, options: tuple[str, ...], *, foreground: bool) -> None:
    """Mount kvfs on the directory MOUNTPOINT.

    With -o remount the command changes options of a mount, as `kvfs remount` does.
    """
    words = option_words(",".join(options))
    if "remount" in words:  # mount(8) runs this command for a remount, too
        if foreground:
            raise ConfigError("--foreground needs a new mount: leave it out of a remount")
        from kvfs.cli.remount import remount  # noqa: PLC0415 - a mount alone needs none of it

        remount(mountpoint, words)
        return
    config = Config.from_options(mountpoint, ",".join(options))
    config.check()
    _check_ended(mountpoint)
    if config.nvme is not None:
        _check_unused(config.nvme)
    foreign = _foreign(config.nvme)
    fresh = "" if config.nvme is None or config.nvme.exists() else printable(config.nvme)
    if foreground:
        if fresh:
            click.echo(f"kvfs: nvme={fresh} does not exist: the mount makes it", err=True)
        _become_keeper(config)
    _start(config)
    if fresh:  # a mistyped name looks like this
        click.echo(
            f"kvfs: nvme={fresh} did not exist: the mount has made it, and it is empty", err=True
        )
    if foreign and config.nvme is not None:
        click.echo(
            f"kvfs: nvme={printable(config.nvme)} has files that are not kvfs's own, such as "
            f"{printable(foreign)}: kvfs leaves them there; was it meant?",
            err=True,
        )
    if config.nvme is not None and runtime.filesystem_magic(config.nvme) == TMPFS:
        click.echo(
            f"kvfs: nvme={printable(config.nvme)} is on a tmpfs, which is memory: a reboot loses "
            "it; give a directory of a disk",
            err=True,
        )
    status = request(mountpoint, "status")
    for line in _excess(status["tiers"]):
        click.echo(line, err=True)
    _warn_of_pool(mountpoint, status)
    click.echo(_what_is_on(mountpoint, status))


def _check_ended(mountpoint: Path) -> None:
    """Wait for the keeper of an unmounted kvfs, which may save objects yet.

    Raises ConfigError with the cure if programs still have files open on a detached mount. Nothing
    is mounted there, so a keeper that answers is one of a detached or an ended mount.
    """
    keeper, began = 0, time.monotonic()
    while True:
        try:
            status = request_keeper(mountpoint, "status")
        except ControlError:
            _wait_for_end(keeper, EXIT_S)
            return
        keeper, waited = status["keeper_pid"], time.monotonic() - began
        if waited > (EXIT_S if status.get("unmounted") else NOTICE_S):
            break
        _wait_for_end(keeper, POLL_S)
    if status.get("unmounted"):
        raise ConfigError(
            f"{mountpoint} was unmounted, and its kvfs (process {keeper}) has not saved all "
            f"objects of RAM in {EXIT_S:.0f} s: see the log, and mount again when it has ended"
        )
    raise Detached(mountpoint, keeper, device=status.get("file_system", "")).refusal()


def _check_unused(nvme: Path) -> None:
    """Raise ConfigError if a detached mount uses this directory. The lock has the last word."""
    for one in detached():
        if one.nvme and os.path.realpath(one.nvme) == os.path.realpath(nvme):
            raise ConfigError(f"nvme={nvme} is in use by a detached mount: {one.refusal()}")


def _wait_for_end(pid: int, seconds: float) -> None:
    """Wait at most so long for the end of a process, if there is one."""
    if not pid:
        return
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([process], [], [], seconds)
    finally:
        os.close(process)


def _become_keeper(config: Config) -> NoReturn:
    """Become the keeper, for a service: this process itself says READY."""
    text = os.memfd_create("kvfs-config")
    os.write(text, config.to_json().encode())
    os.lseek(text, 0, os.SEEK_SET)
    os.dup2(text, 0)
    os.execv(sys.executable, [sys.executable, "-m", "kvfs.keeper", "--foreground"])  # noqa: S606 (no shell is wanted)


def _start(config: Config) -> None:
    """Start the keeper and return when it serves the mount; else raise its reason."""
    with tempfile.TemporaryFile() as stderr:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "kvfs.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd="/",  # keeps no directory busy, and Python imports nothing from the caller's
            start_new_session=True,
            text=True,
        )
        try:
            try:
                line = _converse(keeper, config)
            except BaseException:
                keeper.terminate()
                raise
            answer = json.loads(line) if line else {"error": _death(keeper, stderr)}
        finally:
            if keeper.stdout:
                keeper.stdout.close()
    if "error" in answer:
        keeper.wait()
        raise (ConfigError if answer.get("exit") == USAGE_ERROR else KvfsError)(answer["error"])
    keeper.returncode = 0  # it outlives this process, and Popen would warn of that


def _converse(keeper: "subprocess.Popen[str]", config: Config) -> str:
    if keeper.stdin is None or keeper.stdout is None:
        raise RuntimeError("the keeper was started without pipes")
    try:
        with keeper.stdin:
            keeper.stdin.write(config.to_json())
    except BrokenPipeError:
        return ""  # it died first; the reason is on its stderr
    return keeper.stdout.readline()


def _death(keeper: "subprocess.Popen[str]", stderr: IO[bytes]) -> str:
    code = keeper.wait()
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    return f"the keeper {how} before it was ready: {lines[-1] if lines else 'it said nothing'}"


def _foreign(nvme: Path | None) -> str:
    """Return a name in a directory that has never been an NVMe tier; "" if it has none.

    The check of the mount comes later, and says why it cannot read a directory.
    """
    if nvme is None or not os.access(nvme, os.R_OK | os.X_OK, effective_ids=True):
        return ""
    names = os.listdir(nvme) if nvme.is_dir() else []
    return "" if "identity" in names else min(set(names) - FIRST, default="")


def _excess(tiers: dict[str, Any]) -> Iterator[str]:
    """Yield what goes from a tier whose size is less than what it has: perhaps a mistyped one."""
    for name, tier in tiers.items():
        if began := tier.get("began"):
            below = "s3" in tiers
            for line in excess.lines(name, began, tier["capacity_bytes"], below=below):
                yield f"kvfs: {line}"


def _warn_of_pool(mountpoint: Path, status: dict[str, Any]) -> None:
    """Wait until this node has begun in its pool, and print what does not work there.

    It begins after the mount: nothing waits for it but this command.
    """
    until = time.monotonic() + SERVER_S
    while (pool := status.get("pool")) and (pool["starting"] or not pool["index"]["asked"]):
        if time.monotonic() > until:
            break
        time.sleep(POLL_S / 4)
        status = request(mountpoint, "status")
    if pool is None:
        return
    if not pool["serves"]:
        why = printable(pool["why_not"])
        click.echo(f"kvfs: this node serves no other node of the pool: {why}", err=True)
    index, why = pool["index"], printable(pool["index"]["why"])
    if not index["up"]:
        click.echo(
            f"kvfs: the pool's index does not answer: {why}; kvfs is mounted, and asks again",
            err=True,
        )
    elif index["full"]:
        click.echo(f"kvfs: the pool's index takes no new objects: {why}", err=True)


def _what_is_on(mountpoint: Path, status: dict[str, Any]) -> str:
    parts = [
        f"{name.replace('_', ' ')} {'on' if state['on'] else 'off (' + state['why'] + ')'}"
        for name in ("passthrough", "huge_pages")
        for state in [status[name]]
    ]
    parts += [
        f"{name} {_size(name, tier)}at {tier['path']}" for name, tier in status["tiers"].items()
    ]
    log = status["options"].get("log") or runtime.log_path(mountpoint)
    return printable(f"{mountpoint}: {', '.join(parts)}; log {log}")


def _size(name: str, tier: dict[str, Any]) -> str:
    """Return the size of a tier that has one, or that a bucket does not answer."""
    if name != "s3":
        return f"{human(tier['capacity_bytes'])} "
    return f"({tier['state']}: {tier['why']}) " if tier["state"] != "healthy" else ""
