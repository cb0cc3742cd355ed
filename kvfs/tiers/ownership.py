"""Whose a tier's directory is, looked at before anything in it is believed or written.

Contract: `expect_own` raises ConfigError where somebody else may have made what is there, or may
put something else in its place: a directory of another user, a symbolic link in it, a directory
above that everybody may write to. Who owns a directory above is trusted, and its group. Not for the
modes of the directory itself, nor for what happens to it while it is used by who may.
"""

import os
import stat
from pathlib import Path

from kvfs.errors import ConfigError


def expect_own(what: str, root: Path) -> None:
    """Raises ConfigError that begins with `what`, OSError."""
    mine = os.geteuid()
    link = root.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in {0, mine}:
        raise ConfigError(
            f"{what}={root} is a symbolic link that uid {link.st_uid} has made, expected a "
            "directory, or a link of yours"
        )
    real = Path(os.path.realpath(root))
    found = real.stat()
    if found.st_uid != mine:
        raise ConfigError(
            f"{what}={root} belongs to uid {found.st_uid}, expected uid {mine}, who mounts: others "
            f"could change what is served; chown -R {mine} {real}, or give another directory"
        )
    for above in real.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"{what}={root} is below {above}, to which everybody may write, and so put "
                f"something else in its place; chmod o-w {above}, or give another directory"
            )
    for folder in (real, real / "objects"):
        if folder.is_dir():
            with os.scandir(folder) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
            if links:
                raise ConfigError(
                    f"{what}={root}: {links[0]} is a symbolic link, expected what kvfs makes there "
                    "itself; take it away, or give another directory"
                )
