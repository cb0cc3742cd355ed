"""The user and the password of an index: from a file, or from the environment of the daemon.

Contract: the file has one line with a password, or two lines: a user, then its password. Only its
owner can read it. The file goes before KVFS_POOL_USER and KVFS_POOL_PASSWORD. No message has a
password. An empty user is Redis's user `default`; an empty password: the index asks for none.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvfs import own_files
from kvfs.errors import ConfigError

USER, PASSWORD = "KVFS_POOL_USER", "KVFS_POOL_PASSWORD"
EXPECTED = "a password, or a line with a user and a line with its password"
CURE = "write that there, with mode 0600"


class Credentials(NamedTuple):
    """A user and a password; an empty user is Redis's default user."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.user!r}, {'***' if self.password else ''!r})"


def read(file: Path | None, environ: Mapping[str, str]) -> Credentials:
    """Return the credentials in a file, or without a file those in `environ`. ConfigError."""
    if file is None:
        found = Credentials(environ.get(USER, ""), environ.get(PASSWORD, ""))
        if found.user and not found.password:
            raise ConfigError(f"{USER} is set without {PASSWORD}: set both, or neither")
        return found
    _expect_private(file)
    text = own_files.read(file, EXPECTED, CURE, secret=True)
    user, two, password = (text or "").removesuffix("\n").rpartition("\n")
    if not password or (two and not user) or any(one in user + password for one in "\n\r\0"):
        raise ConfigError(f"pool_credentials={file}: expected {EXPECTED}: {CURE}")
    return Credentials(user, password)


def _expect_private(file: Path) -> None:
    try:
        found = file.lstat()
    except OSError as error:
        raise ConfigError(
            f"pool_credentials={file}: {error.strerror}, expected a file with {EXPECTED}: {CURE}"
        ) from None
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"pool_credentials={file} is {stat.filemode(found.st_mode)}, expected a file with "
            f"{EXPECTED}: {CURE}"
        )
    if mode & 0o077:
        raise ConfigError(
            f"pool_credentials={file} has mode {mode:04o}, so others can read the password: "
            f"chmod 0600 {file}"
        )
    if found.st_uid not in {0, os.geteuid()}:
        raise ConfigError(
            f"pool_credentials={file} belongs to uid {found.st_uid}, expected uid {os.geteuid()}, "
            f"who mounts: chown {os.geteuid()} {file}"
        )
