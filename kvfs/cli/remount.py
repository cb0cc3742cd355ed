"""`kvfs remount` and `mount -o remount`: other options and flags for a mount in use.

Contract: all changes happen, or none. Hot options change in the daemon, as with `kvfs set`. If any
other option differs, a new daemon takes over with all of them, as with `kvfs upgrade`. Flags change
in the kernel. mount(8) adds the words of fstab or of mountinfo to those of the user: a word that
says how the mount is already changes nothing, and the last word about an option counts.
"""

import contextlib
import errno
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click

from kvfs import mounts, runtime
from kvfs.cli import completion, kvfs_mount, mountpoint_argument, users
from kvfs.cli.options import (
    FLAGS_ROW,
    UPGRADED,
    change_by_upgrade,
    change_now,
    present,
    say_changes,
)
from kvfs.config import ALWAYS, FLAGS, Config, option_words
from kvfs.errors import ConfigError, KvfsError
from kvfs.parsing import rows

COMMAND = "kvfs remount"
_HOT = frozenset(row.name for row in rows(Config) if row.hot)
_ON = {on: flag for flag, on in FLAGS.items()} | {"relatime": "noatime"}  # words that remove one


class Asked(NamedTuple):
    """The words of a remount: options by name, and whether a flag is to be on, for those named."""

    options: dict[str, str]
    flags: dict[str, bool]


@click.command(name="remount")
@mountpoint_argument
@click.option(
    "-o",
    "options",
    multiple=True,
    required=True,
    metavar="OPTION[=VALUE],...",
    help="Options and flags to change.",
    shell_complete=completion.options(UPGRADED, [*FLAGS, *FLAGS.values()]),
)
def command(mountpoint: Path, options: tuple[str, ...]) -> None:
    """Change options and flags of a mount in use.

    `mount -o remount,...` does the same. Options change as with `kvfs set` or `kvfs upgrade`; flags
    are ro, noexec, noatime, and their opposites rw, exec, atime. Only root can change flags.
    """
    remount(mountpoint, option_words(",".join(options)))


def remount(mountpoint: Path, words: Iterable[str]) -> None:
    """Change what these words of mount(8) say otherwise, and print it.

    Raises ConfigError, ControlError or KvfsError; then nothing has changed.
    """
    entry = kvfs_mount(mountpoint)
    before = present(mountpoint)
    asked = parse(words, entry)
    options = ",".join(word.replace(",", "\\,") for word in asked.options.values())
    config = before.upgraded(options, by=COMMAND)
    flags = {
        flag
        for flag, on in asked.flags.items()
        if on != (flag in entry.words) and (on or flag not in ALWAYS)
    }
    if flags:
        _change_flags(entry, flags)
    try:
        changed = _change_options(mountpoint, before, config, asked)
    except BaseException:
        if flags:
            with contextlib.suppress(OSError):  # the first reason says more
                mounts.remount(mountpoint, entry.words)
        raise
    if flags:
        say_changes([_flag_change(entry, flags)])
    elif not changed:
        say_changes([])


def parse(words: Iterable[str], entry: runtime.MountEntry) -> Asked:
    """Sort words of mount(8), without those of the kernel that hold already."""
    options: dict[str, str] = {}
    flags: dict[str, bool] = {}
    kernels = set(entry.super_options) - {row.name for row in rows(Config)}
    for word in words:
        if word in FLAGS:
            flags[word] = True
        elif word in _ON:
            flags[_ON[word]] = False
        elif word != "remount" and word not in kernels:
            options[word.partition("=")[0]] = word
    return Asked(options, flags)


def _change_flags(entry: runtime.MountEntry, flags: set[str]) -> None:
    """Turn these flags of the mount over. Raises ConfigError, KvfsError."""
    mountpoint = Path(entry.path)
    told = f"{COMMAND} cannot change {','.join(sorted(flags))} of {mountpoint}"
    try:
        mounts.remount(mountpoint, entry.words ^ flags)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise ConfigError(f"{told}: only root can change flags: use sudo") from error
        if error.errno == errno.EBUSY:
            raise KvfsError(
                f"{told}: expected no file open for writing, end these programs first: "
                f"{users.of_mount(mountpoint)}"
            ) from error
        raise KvfsError(f"{told}: the kernel refused ({error.strerror})") from error


def _flag_change(entry: runtime.MountEntry, flags: set[str]) -> str:
    def text(words: frozenset[str]) -> str:
        return ",".join(one for one in FLAGS if one in words - ALWAYS) or "none"

    return f"{FLAGS_ROW}: {text(entry.words)} -> {text(entry.words ^ flags)}"


def _change_options(mountpoint: Path, before: Config, config: Config, asked: Asked) -> bool:
    """Change the options that differ, and print them. Returns whether there were any."""
    was, become = before.as_options(), config.as_options()
    names = {name for name in was | become if was.get(name) != become.get(name)}
    if not names:
        return False
    if names <= _HOT:
        words = (asked.options[name].partition("=") for name in names)
        change_now(mountpoint, {name: text for name, _, text in words})
        return True
    change_by_upgrade(mountpoint, before, config)
    return True
