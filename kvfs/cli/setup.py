"""`kvfs setup`: make this kvfs known to the system, or take it away again.

Contract: it writes the files of `_files` and links `bin/kvfs` and `share/kvfs` of the prefix to
this kvfs. Each file has a mark that names its owner. A file with another mark, or none, stays as it
is, and a message names it. A second call changes nothing. `--remove` takes away the files with the
mark, and never the options of mounts in /etc/kvfs. Not for what only an administrator can decide:
the command starts no service.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

import kvfs
from kvfs import runtime
from kvfs.cli import kvfs_mounts, main, manual, printable
from kvfs.errors import ConfigError, KvfsError

PARTS = ("helper", "service", "completion", "man")
# Where the two prefixes differ: /usr belongs to packages, /usr/local to the administrator.
_PACKAGES, _LOCAL = "/usr", "/usr/local"
_PACKAGE = "/usr/lib/kvfs"  # below it the environments of Debian packages are
_UNITS = {_PACKAGES: "usr/lib/systemd/system", _LOCAL: "etc/systemd/system"}
_HELPERS = {_PACKAGES: "usr/sbin", _LOCAL: "sbin"}
_ZSH = {_PACKAGES: "usr/share/zsh/vendor-completions", _LOCAL: "usr/local/share/zsh/site-functions"}
_MARKS = {_PACKAGES: "Part of the package kvfs", _LOCAL: "Written by kvfs setup"}
_MARKED = 3  # lines: zsh and sh want theirs first
_PROGRAM = "program=\n"  # in mount.kvfs


class _File(NamedTuple):
    path: Path
    text: str
    mode: int = 0o644


@click.command
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@click.option("--remove", is_flag=True, help="Remove the files that an earlier call has written.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(PARTS),
    help="Only this part; may be repeated. Default: all parts.",
)
@click.option(
    "--root",
    default="/",
    metavar="DIRECTORY",
    help="Write below this directory, for an image or a package. Default: /",
)
@click.option(
    "--prefix",
    default=_LOCAL,
    type=click.Choice([_PACKAGES, _LOCAL]),
    help="/usr is for the package of a distribution. Default: /usr/local",
)
def command(
    mountpoint: str | None, *, remove: bool, only: tuple[str, ...], root: str, prefix: str
) -> None:
    """Make this kvfs known to the system: mount -t kvfs, systemd, shells and man.

    It writes /sbin/mount.kvfs, the unit kvfs@.service, the completion of bash, zsh and fish, and
    the manual pages. /usr/local/bin/kvfs and /usr/local/share/kvfs become links to this kvfs; the
    latter has the documentation, alert rules, a dashboard, a Helm chart and samples.

    With MOUNTPOINT it also makes the directory and /etc/kvfs/MOUNTPOINT.conf, for the service.
    """
    base = Path(root)
    if mountpoint is not None and not os.path.isabs(mountpoint):
        raise ConfigError(f"mount point {mountpoint}: expected an absolute path")
    if mountpoint is not None and remove:
        raise ConfigError(
            f"--remove {mountpoint}: options of mounts stay; unmount with kvfs umount, and delete "
            f"/etc/kvfs{mountpoint}.conf yourself"
        )
    if not base.is_dir():
        raise ConfigError(f"--root {root}: expected a directory that exists")
    if root == "/" and os.geteuid():
        raise ConfigError("kvfs setup writes to system directories: use sudo, or --root DIRECTORY")
    packaged = root == "/" and Path(sys.prefix).is_relative_to(_PACKAGE)
    if packaged and remove:
        raise ConfigError("this kvfs is of the Debian package kvfs: apt remove kvfs removes it")
    parts = only or PARTS
    system = _System(base, prefix)
    try:
        if remove:
            if root == "/":
                _say_mounts()
            system.remove(parts)
        elif packaged:  # a second unit would hide the package's, and name a version that goes
            click.echo("the Debian package kvfs has made this kvfs known to the system")
        else:
            system.install(parts)
        if mountpoint is not None:
            system.prepare(mountpoint)
    except OSError as error:
        raise KvfsError(f"kvfs setup: {error.filename}: {error.strerror}") from error
    if root == "/" and "service" in parts and os.path.isdir("/run/systemd/system"):
        subprocess.run(["systemctl", "daemon-reload"], check=False)


class _System:
    """The files of kvfs below `root`."""

    def __init__(self, root: Path, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._mark = _MARKS[prefix]
        self._program = f"{prefix}/bin/kvfs"  # as the files call it, in the system below `root`

    def install(self, parts: tuple[str, ...]) -> None:
        """Write what is missing or of another version, and say so."""
        changed = self._link(self._at(self._program), _this_program())
        if "service" in parts:
            changed |= self._link(self._at(f"{self._prefix}/share/kvfs"), shared_files())
        for file in self._files(parts):
            if self._may_write(file.path):
                file.path.parent.mkdir(parents=True, exist_ok=True)
                if _read(file.path) != file.text:
                    # A new file: no reader sees half of it, and a link is not followed.
                    fresh = file.path.with_name(f"{file.path.name}.kvfs-new")
                    fresh.write_text(file.text)
                    fresh.chmod(file.mode)
                    fresh.replace(file.path)
                    click.echo(f"wrote {printable(file.path)}")
                    changed = True
        if not changed:
            click.echo("nothing to change")

    def remove(self, parts: tuple[str, ...]) -> None:
        """Remove the files with the mark, and the links to a kvfs if all parts go."""
        for file in self._files(parts):
            if self._owner(file.path) == self._mark:
                file.path.unlink()
                click.echo(f"removed {printable(file.path)}")
        if set(parts) == set(PARTS):
            for name, target in (("bin", _this_program()), ("share", shared_files())):
                link = self._at(f"{self._prefix}/{name}/kvfs")
                if link.is_symlink() and os.readlink(link) == str(target):
                    link.unlink()
                    click.echo(f"removed {printable(link)}")

    def prepare(self, mountpoint: str) -> None:
        """Make the mount point, and its options from the sample unless there are some."""
        point = runtime.canonical(mountpoint)
        options = self._at(f"/etc/kvfs{point}.conf")
        if options.exists():
            click.echo(f"{printable(options)} is there and is left alone")
        else:
            options.parent.mkdir(parents=True, exist_ok=True)
            options.touch(mode=0o600)
            options.write_text((shared_files() / "mount/systemd/kvfs.conf.sample").read_text())
            click.echo(f"wrote {printable(options)}: put your options there")
        self._at(str(point)).mkdir(parents=True, exist_ok=True)
        unit = f"kvfs@{runtime.escape(point)}.service"
        click.echo(f"then: systemctl enable --now '{printable(unit)}'")

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _files(self, parts: tuple[str, ...]) -> Iterator[_File]:
        shared, prefix = shared_files() / "mount", self._prefix
        if "helper" in parts:
            text = (shared / "mount.kvfs").read_text()
            text = text.replace(_PROGRAM, f"program={self._program}\n")
            # mount(8) looks for the second name when it remounts.
            for name in ("mount.kvfs", "mount.fuse.kvfs"):
                yield self._marked(f"{_HELPERS[prefix]}/{name}", text, mode=0o755)
        if "service" in parts:
            text = (shared / "systemd" / "kvfs@.service").read_text()
            text = text.replace(f"{_LOCAL}/", f"{prefix}/")
            yield self._marked(f"{_UNITS[prefix]}/kvfs@.service", text)
        if "completion" in parts:
            below = f"{prefix}/share"
            for shell, path in (
                ("bash", f"{below}/bash-completion/completions/kvfs"),
                ("zsh", f"{_ZSH[prefix]}/_kvfs"),
                ("fish", f"{below}/fish/vendor_completions.d/kvfs.fish"),
            ):
                made = get_completion_class(shell)  # bash's is of kvfs.cli.completion
                if made is None:
                    raise LookupError(f"click has no completion for {shell}")
                yield self._marked(path, made(main, {}, "kvfs", "_KVFS_COMPLETE").source())
        if "man" in parts:
            for name, text in manual.pages(main).items():
                yield self._marked(f"{prefix}/share/man/man{name[-1]}/{name}", text, '.\\" ')

    def _marked(self, path: str, text: str, comment: str = "# ", mode: int = 0o644) -> _File:
        """A file with the mark: on its first line, or on the second if the first must stay."""
        first, newline, rest = text.lstrip("\n").partition("\n")
        mark = f"{comment}{self._mark} {kvfs.__version__}.\n"
        lines = (
            f"{first}\n{mark}{rest}" if first.startswith("#") else f"{mark}{first}{newline}{rest}"
        )
        return _File(self._at(path), lines, mode)

    def _owner(self, path: Path) -> str:
        """The mark of a file; empty: it has none, or is not there."""
        head = "\n".join((_read(path) or "").split("\n")[:_MARKED])
        return next((mark for mark in _MARKS.values() if mark in head), "")

    def _may_write(self, path: Path) -> bool:
        if not os.path.lexists(path) or self._owner(path) == self._mark:
            return True
        if _is_of_a_checkout(path):
            return True
        owner = self._owner(path)
        of = "belongs to the package kvfs" if owner == _MARKS[_PACKAGES] else "is not of kvfs setup"
        click.echo(f"{printable(path)} {of} and is left alone", err=True)
        return False

    def _link(self, link: Path, target: Path) -> bool:
        """Make or change a link. Returns whether it is new."""
        if os.path.realpath(link) == os.path.realpath(target):
            return False
        if os.path.lexists(link) and not link.is_symlink():
            click.echo(f"{printable(link)} is no link and is left alone", err=True)
            return False
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f"{link.name}.kvfs-new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)
        click.echo(f"linked {printable(link)} to {printable(target)}")
        return True


def _say_mounts() -> None:
    """Name the mounts that go on without the files of this kvfs."""
    if mounted := kvfs_mounts():
        click.echo(
            f"kvfs setup: still mounted: {', '.join(map(printable, mounted))}; unmount them with "
            "kvfs umount before you delete this kvfs",
            err=True,
        )


def shared_files() -> Path:
    """Return the directory with mount/ (unit, rules, chart, samples) and docs/."""
    package = Path(kvfs.__file__).parent
    packaged = package / "share"
    return packaged if packaged.is_dir() else package.parent


def _this_program() -> Path:
    """Return the program `kvfs` of this interpreter's environment. Raises KvfsError."""
    program = Path(sys.executable).parent / "kvfs"
    if not program.exists():
        found = shutil.which("kvfs")
        if found is None:
            raise KvfsError(f"{program} does not exist: install kvfs with pip, then run kvfs setup")
        program = Path(found)
    return program


def _is_of_a_checkout(path: Path) -> bool:
    """Earlier versions made a link to the helper of a checkout."""
    return path.is_symlink() and os.path.basename(os.readlink(path)) == "mount.kvfs"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
