"""Finds detached mounts: no mount point leads to them, and their daemons serve open files.

Contract: nothing is stored. A mount is detached if its keeper answers, no kvfs is mounted at its
mount point, and its daemon has not seen the end of the mount. So a mount may seem detached for a
moment after its unmount. Not for the names of the users of a mount (`users`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvfs import own_files, runtime
from kvfs.cli import users
from kvfs.control import request_keeper
from kvfs.errors import ConfigError, KvfsError

PATIENCE = 2.0  # s for each keeper
_OPTIONS, _CURE = "the options of a mount", "run kvfs set again on that mount"


class Detached(NamedTuple):
    """A detached mount."""

    mountpoint: Path
    keeper: int  # the number of its process
    nvme: str = ""  # the directory of its NVMe tier; "" without one
    device: str = ""  # of its file system, MAJOR:MINOR; "" if a keeper of an earlier version serves

    def refusal(self) -> ConfigError:
        """Return the error of a command: the reason why its daemon has not ended, and the cure."""
        if stop := users.end_of_export(self.mountpoint):
            return ConfigError(
                f"{self.mountpoint} was detached while it was exported, and its kvfs (process "
                f"{self.keeper}) serves it until the export ends; end it first: {stop}"
            )
        files, copies = (
            users.of_detached(self.device),
            users.of_copies(self.mountpoint, self.device),
        )
        if copies and not files:
            return ConfigError(
                f"{self.mountpoint} was unmounted here, and its kvfs (process {self.keeper}) "
                f"serves other mount namespaces, with {copies}: unmount it there"
            )
        also = f"; other mount namespaces have it, too, with {copies}" if copies else ""
        return ConfigError(
            f"{self.mountpoint} was detached, and its kvfs (process {self.keeper}) serves it until "
            "all its files are closed and saved: end the processes that use it. "
            f"{'Its files' if self.device else 'Files of detached mounts'} are open in "
            f"{files or users.UNSEEN}{also}"
        )


def at(mountpoint: Path) -> Detached | None:
    """Return the detached mount of this mount point, or None."""
    directory = runtime.runtime_dir(mountpoint)
    return next((one for one in _in([directory]) if one.mountpoint == mountpoint), None)


def detached() -> list[Detached]:
    """Return all detached mounts of this user."""
    return list(_in(runtime.runtime_dirs()))


def _in(directories: list[Path]) -> Iterator[Detached]:
    attached = {one.path for one in runtime.mounts() if one.fstype == runtime.FSTYPE}
    for directory in directories:
        try:
            config = own_files.read_table(directory / "config", _OPTIONS, _CURE)
            if not config or config["mountpoint"] in attached:
                continue
            mountpoint = Path(config["mountpoint"])
            status = request_keeper(mountpoint, "status", patience=PATIENCE)
        except KvfsError:  # the directory of a mount that has ended, and of none that answers
            continue
        if not status.get("unmounted"):
            nvme, device = config.get("nvme") or "", status.get("file_system", "")
            yield Detached(mountpoint, status["keeper_pid"], nvme, device)
