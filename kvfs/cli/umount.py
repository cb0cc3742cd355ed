"""`kvfs umount`: save the objects that only RAM holds, unmount, and wait for the daemon's end.

A save may drop other objects from a full NVMe. So the command first looks for users of the mount,
and leaves a busy mount as it is. The kernel has the last word: it knows users that are not visible.
If an object cannot be saved, the command stops and gives the reason, unless told `--now`. An object
larger than the largest file of NVMe's file system is lost, with a message. Any user can make such a
file, and it must not block the unmount for all others. The command waits for keeper and daemon,
because the next mount needs their locks.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import click

from kvfs import mounts, own_files, runtime
from kvfs.cli import human, kvfs_mount, mountpoint_argument, printable, users
from kvfs.cli.screen import moving
from kvfs.control import request
from kvfs.errors import ConfigError, ControlError, KvfsError

POLL_S = 0.2
STALLED_S = 60.0  # no NVMe device needs that long for one object; a guess, not a measurement
EXIT_S = 60.0
NOW_S = 5.0  # with --now the keeper waits for the daemon for less than that


@click.command
@mountpoint_argument
@click.option(
    "--now",
    is_flag=True,
    help="Do not save objects that only RAM holds, and print how many. Ends within 5 s.",
)
@click.option(
    "-l", "--lazy", is_flag=True, help="Detach now. The daemon ends when the last file is closed."
)
def command(mountpoint: Path, *, now: bool, lazy: bool) -> None:
    """Unmount, and save objects of RAM to NVMe first.

    Objects that NVMe or the bucket has already need no saving.
    """
    mounted = _is_mounted(mountpoint, now=now)
    entry = runtime.mount_at(mountpoint)
    keeper, lost = _keeper(mountpoint), None
    try:
        names = users.blocking(entry) if mounted and entry else ""
        if names and not lazy:
            raise _busy(mountpoint, names)
        if keeper is not None and not now:
            lost = _write_back(mountpoint)
        if keeper is not None and now:
            lost = request(mountpoint, "discard_ram", on=True, lasting=lazy)
        try:
            if mounted:
                _unmount(mountpoint, lazy=lazy)
        except KvfsError:
            if keeper is not None and now:  # the mount goes on, and must not lose an object later
                request(mountpoint, "discard_ram", on=False)
            raise
        if keeper is None:
            _clear_killed(mountpoint, now=now)
        if names:
            end = users.end_of_export(mountpoint) or "end these processes"
            click.echo(
                f"kvfs: {printable(mountpoint)} is detached, and still in use by {names}; before "
                f"you mount again: {end}",
                err=True,
            )
        if lost and not now:  # else it is said when the daemon has ended
            _say_lost(lost)
        patience = NOW_S if now else EXIT_S
        if keeper is not None and not lazy and not select.select([keeper], [], [], patience)[0]:
            copies = users.of_copies(mountpoint, entry.device if entry else "")
            why = (
                f"it serves other mount namespaces, with {copies}: unmount it there"
                if copies
                else "it waits for a disk or a bucket; see the log"
            )
            raise KvfsError(
                f"{mountpoint} is unmounted, but its daemon has not ended in {patience:.0f} s: "
                f"{why}"
            )
        if lost and now and not _say_lost(lost):
            click.echo("nothing was lost")
    finally:
        if keeper is not None:
            os.close(keeper)


def _is_mounted(mountpoint: Path, *, now: bool) -> bool:
    """Return False if it is unmounted, and `--now` has to end the daemon, which still saves.

    Raises ConfigError if there is no kvfs.
    """
    try:
        kvfs_mount(mountpoint)
    except ConfigError:
        if not now or not runtime.keeper_path(mountpoint).exists():
            raise
        return False
    return True


def _keeper(mountpoint: Path) -> int | None:
    """Return a pidfd of the keeper, which ends after the daemon, or of a daemon without one.

    None if both are dead, which must not prevent an unmount.
    """
    try:
        status = request(mountpoint, "status")
        return os.pidfd_open(status["keeper_pid"] or status["daemon_pid"])
    except (ConfigError, ControlError, ProcessLookupError) as error:
        if isinstance(error, ConfigError) and os.geteuid():
            raise  # another user's mount; root may unmount it without asking
        # The error of a request says: run this command.
        why = f"no daemon answers ({error.__cause__})" if error.__cause__ else error
        click.echo(f"kvfs: unmounting without the daemon's help: {why}", err=True)
        return None


def _clear_killed(mountpoint: Path, *, now: bool) -> None:
    """End the nginx that a killed keeper and daemon have left; with `now`, free RAM as well.

    A keeper that lives has the lock, and clears all at its end.
    """
    from kvfs.pool.nginx import Nginx  # noqa: PLC0415 - few unmounts need it

    directory = runtime.runtime_dir(mountpoint)
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Nginx(directory / "nginx").stop()
        if not _clear_memory(mountpoint, directory, now=now):
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _clear_memory(mountpoint: Path, directory: Path, *, now: bool) -> bool:
    """Free the RAM tier of a killed mount if told `now`; return whether it stays."""
    from kvfs.tiers import NvmeTier, RamTier  # noqa: PLC0415 - few unmounts need them
    from kvfs.tiers.ram import identity_at  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        try:
            text = own_files.read(directory / "config", "the options of a mount", "remove it")
            at, identity = json.loads(text or "{}").get("nvme"), identity_at(mountpoint)
            if at is not None:  # its lock: another mount may have the directory, and RAM with it
                identity = own_files.read_uuid(directory / "nvme", "remove it") or ""
                stack.callback(NvmeTier(Path(at), 0, expected=identity).close)
            root = runtime.ram_path(identity)
            ram = RamTier(root, 0, identity=identity, epoch=None, huge=None)
        except (KvfsError, ValueError):  # there is none, or it is not of this mount
            return False
        ram.close()
        if now:
            ram.remove()
            click.echo(f"kvfs: {ram.root} is removed: what only RAM had is lost", err=True)
        else:
            cure = f"kvfs umount --now {printable(mountpoint)}"
            click.echo(
                f"kvfs: {ram.root} stays for the next mount, with what only RAM has; to remove it: "
                f"{cure}",
                err=True,
            )
        return not now


def _write_back(mountpoint: Path) -> dict[str, Any] | None:
    """Poll until nothing is left to save; a bar shows it if that takes long enough to be read.

    Returns the objects that are lost with RAM; None: a daemon of an earlier version does not say.
    """
    with moving("writing back") as bar:
        task, total, least, before = None, 0, None, None
        moved = time.monotonic()
        while True:
            found = request(mountpoint, "write_back")
            if before is None:  # an earlier write back may have dropped objects, and has told it
                before = found.get("displaced", 0)
            if not (left := found["bytes_left"]):
                break
            if why := found.get("stuck"):
                raise KvfsError(
                    f"{human(left)} are only in RAM, and {why}: repair that, or lose these bytes: "
                    f"kvfs umount --now {mountpoint}"
                )
            if least is None or left < least:
                least, moved = left, time.monotonic()
            elif time.monotonic() - moved > STALLED_S:
                raise KvfsError(
                    f"{human(left)} are only in RAM, and none was saved in {STALLED_S:.0f} s: see "
                    f"the log, or lose these bytes: kvfs umount --now {mountpoint}"
                )
            total = max(total, left)
            if task is None:
                task = bar.add_task("", total=total)
            bar.update(task, total=total, completed=total - left)
            time.sleep(POLL_S)
    if (lost := found.get("displaced", 0) - before) > 0:
        click.echo(
            f"kvfs: {lost} objects were dropped to save what RAM held: NVMe is full, give a "
            "larger nvme_size",
            err=True,
        )
    return found.get("lost")


def _say_lost(lost: dict[str, Any]) -> bool:
    """Print the objects that are lost with RAM, and return whether there may be any."""
    if not lost["objects"] and lost["census_done"]:
        return False
    least = "" if lost["census_done"] else "at least "
    large = lost.get("too_large", 0)  # a daemon of an earlier version does not say it, nor `pool`
    click.echo(
        f"kvfs: {least}{lost['objects']} objects ({human(lost['bytes'])}) are lost with RAM: "
        "neither NVMe nor the bucket had them"
        + ("; other nodes of the pool may have some of them" if lost.get("pool") else "")
        + (f"; {large} of them are too large for NVMe, see the log" if large else ""),
        err=True,
    )
    return True


def _unmount(mountpoint: Path, *, lazy: bool) -> None:
    program = mounts.umount_command(lazy=lazy)
    environment = os.environ | {"LC_ALL": "C"}
    try:
        subprocess.run(
            [*program, "--", mountpoint],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise KvfsError(
            f"{program[0]} is not installed: install the packages mount and fuse3"
        ) from None
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip().rstrip(".") or f"{program[0]} exited with {error.returncode}"
        if "busy" in message:
            raise _busy(mountpoint, users.of_mount(mountpoint)) from None
        raise KvfsError(message) from None


def _busy(mountpoint: Path, names: str) -> KvfsError:
    """Return the error for a mount that is in use."""
    cure = (stop := users.end_of_export(mountpoint)) and f": {stop}"
    return KvfsError(
        f"{mountpoint} is busy; in use by {names}{cure}; or detach it: "
        f"kvfs umount --lazy {mountpoint}"
    )
