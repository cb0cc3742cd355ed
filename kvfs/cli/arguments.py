"""Words of a command line that several commands take."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvfs import runtime
from kvfs.errors import ConfigError


def assignments(words: Iterable[str], what: str) -> dict[str, str]:
    """Return the texts of NAME=VALUE words by name; `what` they are: options, settings.

    Raises ConfigError for a word of another form, and for a name that is given twice.
    """
    texts: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: expected NAME=VALUE")
        if name in texts:
            raise ConfigError(f"{what} {name} is given twice")
        texts[name] = text
    return texts


class Place(NamedTuple):
    """What a path means: an inode of a mount."""

    mountpoint: Path
    ino: int


def on_mount(path: str, *, follow: bool = True) -> Place:
    """Return the mount that a path is on, and its inode there. Raises ConfigError.

    follow: what a symbolic link leads to; else the link itself.
    """
    real = Path(os.path.realpath(path))
    if not follow and os.path.islink(path):
        real = Path(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
    mount = runtime.kvfs_holding(real)
    if mount is None:
        raise ConfigError(f"{path} is on no mount of kvfs; there are: {runtime.list_mounts()}")
    try:
        ino = real.lstat().st_ino
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if runtime.is_control_file(ino):
        raise ConfigError(f"{path}: the name is kvfs's own, for its control files")
    return Place(Path(mount.path), ino)
