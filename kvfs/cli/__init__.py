"""The command line: a command's module is imported only when that command runs.

`kvfs status` in a monitoring loop must not load the code that `kvfs mount` needs. Every refusal is
one line on stderr. The exit code is 2 for a mistake of the caller, and 1 for a failure. The
commands decide nothing themselves: they ask the daemon, or start it.
"""

import contextlib
import difflib
import errno
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvfs import __version__, runtime
from kvfs.cli import completion
from kvfs.control import of_another_user, request, unanswered
from kvfs.control.client import DISREGARDED, request_within
from kvfs.errors import ConfigError, ControlError, KvfsError
from kvfs.units import human as human

# In the order of the help.
GROUPS = {
    "Mounts": (
        "mount",
        "umount",
        "mounts",
        "get",
        "set",
        "remount",
        "upgrade",
        "export",
        "connect",
    ),
    "Looking": ("status", "top", "stat", "du", "match", "pool", "bench", "profile"),
    "Objects and namespaces": ("ns", "pin", "warm", "evict", "import", "flush"),
    "Check and repair": ("doctor", "fsck", "gc"),
    "Sizing": ("simulate", "replay"),
    "Other": ("setup", "version"),
}
INSTEAD = {  # of commands that kvfs does not have
    "check": "run kvfs fsck",
    "df": "run df MOUNTPOINT, or kvfs status",
    "events": "read MOUNTPOINT/.kvfs/events",
}
COMMANDS = tuple(chain.from_iterable(GROUPS.values()))
# A module with several commands has NAME_command in it; a single command is called `command`.
_HOMES = {
    **dict.fromkeys(("evict", "flush", "import", "pin", "warm"), "jobs"),
    **dict.fromkeys(("get", "set", "upgrade"), "options"),
}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EIO}  # of a disk, whatever file the user gave
DEAD = {errno.ENOTCONN, errno.ECONNABORTED}  # of a mount whose daemon has died
PATIENCE = 2.0  # s for an answer that the command can do without
_PARTS = ("identity", "catalog", "objects")  # of an NVMe tier's directory


class Refusal(click.ClickException):
    """A failure: one line on stderr, and exit code 1."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(" ".join(reason.split())))

    def show(self, file: Any = None) -> None:  # noqa: ANN401 - click's own signature
        """Print the reason, behind the name of the program that refuses."""
        click.echo(f"kvfs: {self.format_message()}", file=file, err=file is None)


class BadInput(Refusal):
    """A mistake of the caller, exit code 2. Nothing was changed."""

    exit_code = 2


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise  # `kvfs` alone: its message is the help
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else _command_path()
        raise BadInput(f"{error.format_message().rstrip('.')} (see {where} --help)") from error
    except ConfigError as error:
        raise BadInput(with_notes(error)) from error
    except KvfsError as error:
        raise Refusal(with_notes(error)) from error


def _command_path() -> str:
    """Return the command whose words are parsed, if click does not say it: `kvfs upgrade`."""
    group = click.get_current_context(silent=True)
    return f"{group.command_path} {group.invoked_subcommand or ''}".rstrip() if group else "kvfs"


def with_notes(error: BaseException, text: str = "") -> str:
    """Return the error's message, or the text instead, followed by the notes of the error."""
    return "; ".join([text or str(error), *getattr(error, "__notes__", ())])


class Group(click.Group):
    """Commands whose refusals are one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command, with the same care for refusals."""
        with _one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        """Run the command, and turn its exceptions into one line and an exit code."""
        with _one_line():
            return super().invoke(ctx)


class Commands(Group):
    """The group that imports a command's module when the user asks for the command."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the order of their use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Return the command of that name, from its module."""
        if cmd_name not in COMMANDS:
            return None
        home = _HOMES.get(cmd_name)
        module = importlib.import_module(f"kvfs.cli.{home or cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command" if home else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. An unknown name gets the nearest ones as a suggestion."""
        known = ctx.resilient_parsing or not args  # a completion says nothing
        if not known and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS)
            cure = f"did you mean {' or '.join(near)}?" if near else "see kvfs --help"
            cure = INSTEAD.get(args[0], cure)
            raise BadInput(f"no such command {args[0]!r}: {cure}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups."""
        for title, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            width = formatter.width - 6 - max(map(len, COMMANDS))
            with formatter.section(title):
                formatter.write_dl(
                    [(name, one.get_short_help_str(width)) for name, one in found if one]
                )


_disregarded: dict[str, float] = {}  # monotonic s of the next `disregard`, by mount point


def disregard_lookups(path: str | os.PathLike[str]) -> None:
    """Have the daemon of a path's mount count no lookup of this process as a miss for a while.

    Call it before the path is followed. A mount that no symbolic link hides is found.
    """
    plain = os.path.abspath(path)
    mount = runtime.kvfs_holding(Path(plain))
    if mount is None or plain == mount.path or time.monotonic() < _disregarded.get(mount.path, 0):
        return
    _disregarded[mount.path] = time.monotonic() + DISREGARDED / 2
    with contextlib.suppress(KvfsError):  # the command itself says that no daemon answers
        request_within(Path(mount.path), PATIENCE, "disregard")


class PathOnMount(click.Path):
    """The path of a file or directory on a mount. click follows it before the command runs."""

    def convert(
        self,
        value: "str | os.PathLike[str]",
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - click's own signature
        """Return the path, and let no lookup of it be a miss."""
        disregard_lookups(value)
        return super().convert(value, param, ctx)


def _canonical(_ctx: click.Context, _param: click.Parameter, value: str) -> Path:
    if not value:  # an unset variable in a script; it would mean the current directory
        raise click.BadParameter("the mount point is empty: expected a path")
    disregard_lookups(value)
    return runtime.canonical(value)


def _mounted(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path:
    """The mount point that a path is on; without a path that of the only kvfs."""
    if value is not None:
        path = _canonical(_ctx, _param, value)
        around = None if runtime.mount_at(path) else runtime.kvfs_holding(path)
        if around is None:
            return Path(kvfs_mount(path).path)
        expect_there(value, path)
        return Path(around.path)
    found = kvfs_mounts()
    if len(found) != 1:
        raise click.BadParameter(
            f"{len(found)} kvfs are mounted: give one of {', '.join(found)}"
            if found
            else "no kvfs is mounted: run kvfs mount first"
        )
    return Path(found[0])


class FiniteRange(click.FloatRange):
    """A range of numbers, without nan, which is in each range, and without inf."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - click's signature
        """Return the number. Raises BadParameter."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a valid number: expected {self._describe_range()}", param)
        return found


mountpoint_argument = click.argument(
    "mountpoint",
    metavar="MOUNTPOINT",
    type=click.UNPROCESSED,
    callback=_canonical,
    shell_complete=completion.directories,
)
mountpoints_argument = click.argument(
    "mountpoints",
    metavar="MOUNTPOINT...",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    callback=lambda ctx, param, values: tuple(_canonical(ctx, param, one) for one in values),
    shell_complete=completion.directories,
)
# Of commands that ask a mount: any path on it will do.
mounted_argument = click.argument(
    "mountpoint",
    metavar="[MOUNTPOINT]",
    type=click.UNPROCESSED,
    required=False,
    callback=_mounted,
    shell_complete=completion.directories,
)
target_argument = click.argument(
    "target",
    metavar="TARGET",
    type=click.UNPROCESSED,
    callback=_canonical,
    shell_complete=completion.directories,
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def give(found: Any, show: Callable[[Any], object], *, as_json: bool) -> None:  # noqa: ANN401 (JSON)
    """Print what was found as JSON for programs, or have `show` print it."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)


def is_kvfs(path: Path) -> bool:
    """Return whether `path` is a mount point of kvfs."""
    mount = runtime.mount_at(path)
    return mount is not None and mount.fstype == runtime.FSTYPE


def kvfs_mount(path: Path) -> runtime.MountEntry:
    """Return the kvfs mount at this canonical path. ConfigError says what is there instead."""
    from kvfs.cli import detached  # noqa: PLC0415 (it needs this module)

    try:
        return runtime.kvfs_mount(path)
    except ConfigError as error:
        if found := detached.at(path):
            raise found.refusal() from error
        raise


def kvfs_mounts() -> list[str]:
    """Return the mount points of all kvfs mounts."""
    return [found.path for found in runtime.mounts() if found.fstype == runtime.FSTYPE]


def is_mount(path: Path) -> bool:
    """Return whether a kvfs is mounted there. False: it is an NVMe directory; else ConfigError."""
    if is_kvfs(path):
        return True
    lacking = [part for part in _PARTS if not os.path.exists(path / part)]
    if lacking:
        raise ConfigError(
            f"{path} is neither a mount point of kvfs (there are: "
            f"{', '.join(kvfs_mounts()) or 'none'}) nor an NVMe directory (nvme=): it has no "
            f"{', no '.join(lacking)}"
        )
    return False


def assignments(words: Iterable[str], what: str) -> dict[str, str]:
    """Return the values of NAME=VALUE words by name. `what` names them: options, settings.

    Raises ConfigError for a word of another form, and for a name that is given twice.
    """
    texts: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: expected NAME=VALUE")
        if name in texts:
            raise ConfigError(f"{what} {name} is given twice: give it once")
        texts[name] = text
    return texts


class MountInode(NamedTuple):
    """An inode of a mount, which a path led to."""

    mountpoint: Path
    ino: int


def on_mount(path: str, *, follow: bool = True) -> MountInode:
    """Return the mount that a path is on, and its inode there. Raises ConfigError, ControlError.

    `follow`: use the target of a symbolic link; without it the link itself.
    """
    if not path:  # an unset variable in a script; it would mean the current directory
        raise ConfigError("the path is empty: expected a path on a mount")
    disregard_lookups(path)
    real = Path(os.path.realpath(path))
    if not follow and os.path.islink(path):
        real = Path(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
    mount = runtime.kvfs_holding(real)
    if mount is None:
        raise ConfigError(f"{path} is on no mount of kvfs; mounts: {runtime.list_mounts()}")
    ino = expect_there(path, real).st_ino
    if runtime.is_control_file(ino):
        raise ConfigError(f"{path}: the name is kvfs's own, for its control files")
    return MountInode(Path(mount.path), ino)


def expect_there(path: str, real: Path) -> os.stat_result:
    """Return the attributes of what is at `real`, the canonical path of `path`, on a mount.

    Raises ConfigError, ControlError.
    """
    try:
        return real.lstat()
    except OSError as error:
        raise unreachable(path, error) from error


def unreachable(path: str | os.PathLike[str], error: OSError) -> ConfigError | ControlError:
    """Return the error for a path that cannot be looked at. ControlError: its daemon is dead."""
    mount = runtime.kvfs_holding(Path(os.path.realpath(path)))
    if mount is not None and error.errno in DEAD:
        return unanswered(Path(mount.path), error)
    if mount is not None and error.errno == errno.EACCES:  # mounted without allow_other
        told = of_another_user(Path(mount.path))
        if told is not None:
            return told
    if mount is not None and error.errno == errno.ENOENT and _lacks_index(Path(mount.path)):
        return ControlError(
            f"{path}: {error.strerror}, and the pool's index does not answer, so names of other "
            f"nodes are not known: see kvfs pool {mount.path}"
        )
    return ConfigError(f"{path}: {error.strerror}, expected a file or directory that is there")


def _lacks_index(mountpoint: Path) -> bool:
    """Whether a mount has a pool whose index does not answer."""
    try:
        pool = request(mountpoint, "status").get("pool")
    except (ControlError, ConfigError):  # another user's
        return False
    return pool is not None and not pool["index"]["up"]


def unwritten(what: str, error: OSError) -> KvfsError:
    """Return the error for a file that cannot be written. ConfigError: its path is wrong."""
    told = f"{what}: {os.strerror(error.errno or 0)}"
    if error.errno in FULL:
        return KvfsError(f"{told}: make room there, or give a file on another disk")
    return ConfigError(f"{told}, expected a path where uid {os.geteuid()} may write a file")


def printable(text: str | os.PathLike[str]) -> str:
    """Return a text safe for a terminal, although it contains names that other users chose.

    Names may have any bytes but a slash. A character that cannot be printed is escaped as Python
    does it.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in os.fspath(text))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvfs")
def main() -> None:
    """Run kvfs, a file system for the KV caches of LLM inference."""
