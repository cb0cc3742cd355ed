"""Read and write the small files that kvfs keeps for itself, for example identities.

Contract: `read` and the `read_*` functions return only content that kvfs could have written. For
other content they raise ConfigError, with a message of one line: the file, its content (escaped and
cut), the expected content, the cure. A read follows no link, waits for no pipe, and reads at most
LIMIT bytes. After `write` the file has its whole old content or its whole new content, also after a
power loss. `inside` checks a name from a file's content before kvfs builds a path with it. Not for
files of users, nor for objects.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfs.errors import ConfigError

LIMIT = 1 << 20  # bytes; the largest is a configuration of some 1.5 KiB
SHOWN = 60  # bytes of a file's content that a message shows
DISK_FAILED = {errno.EIO, errno.ENODEV, errno.EUCLEAN, errno.ESHUTDOWN}
NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO}  # of open(2): a directory, a link, a pipe
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NUMBER = re.compile(r"[0-9]{1,19}")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


def wrong(path: Path, found: str | bytes, expected: str, cure: str) -> ConfigError:
    """Return the error for content that kvfs has not written. It shows the begin of the content."""
    raw = os.fsencode(found) if isinstance(found, str) else found
    shown = ascii(raw[:SHOWN])[1:] + ("..." if len(raw) > SHOWN else "")
    return ConfigError(f"{path} has {shown}, expected {expected}: {cure}")


def read(path: Path, expected: str, cure: str, *, secret: bool = False) -> str | None:
    """Return the text of a file, None if there is none. Raises ConfigError.

    secret: the message shows nothing of the content.
    """
    try:
        file = open_regular(path, os.O_RDONLY, expected, cure)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unread(path, "opened", error, expected, cure) from error
    try:
        content = os.pread(file, LIMIT + 1, 0)
    except OSError as error:
        raise _unread(path, "read", error, expected, cure) from error
    finally:
        os.close(file)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and len(content) <= LIMIT:
        return text
    if secret and text is None:
        raise ConfigError(f"{path} has bytes that are no UTF-8, expected {expected}: {cure}")
    if secret:
        raise ConfigError(f"{path} has more than {LIMIT} bytes, expected {expected}: {cure}")
    raise wrong(path, content, expected, cure)


def open_regular(path: Path, flags: int, expected: str, cure: str) -> int:
    """Open a regular file, and return its descriptor. Never wait for a pipe.

    Raises ConfigError if the path is no regular file, and OSError as open(2) does.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        mode = os.fstat(file).st_mode
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        file, mode = -1, path.lstat().st_mode
    if not stat.S_ISREG(mode):
        if file >= 0:
            os.close(file)
        raise ConfigError(
            f"{path} is {stat.filemode(mode)}, expected a file with {expected}: {cure}"
        )
    return file


def _unread(path: Path, what: str, error: OSError, expected: str, cure: str) -> ConfigError:
    """Return the error for a file that kvfs cannot read. The cure depends on the error's cause."""
    if error.errno in DISK_FAILED:
        cure = "its disk or file system fails: mount it again, or use another one"
    return ConfigError(
        f"{path} cannot be {what} ({error.strerror}), expected a file with {expected}: {cure}"
    )


def read_uuid(path: Path, cure: str) -> str | None:
    """Return the UUID that a file has, None if there is none. Raises ConfigError."""
    text = read(path, expected := "a UUID", cure)
    if text is not None and not UUID_TEXT.fullmatch(text.strip()):
        raise wrong(path, text, expected, cure)
    return None if text is None else text.strip()


def read_number(path: Path, cure: str) -> int | None:
    """Return the number that a file has, None if there is none. Raises ConfigError."""
    text = read(path, expected := "a number", cure)
    if text is not None and not _NUMBER.fullmatch(text):
        raise wrong(path, text, expected, cure)
    return None if text is None else int(text)


def read_table(path: Path, expected: str, cure: str) -> dict[str, Any] | None:
    """Return the JSON object that a file has, None if there is none. Raises ConfigError."""
    text = read(path, expected, cure)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise wrong(path, text, expected, cure)
    return found


def write(path: Path, text: str) -> None:
    """Replace the whole content of a file, durably. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(fresh, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    sync(path.parent)


def sync(directory: Path) -> None:
    """Sync the names in a directory to its disk. Raises OSError."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def ensure_folder(path: Path) -> None:
    """Make a directory if there is none. Raises OSError.

    Raises ConfigError if the path is a link or a file.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise ConfigError(
            f"{path} is {stat.filemode(mode)}, expected a directory that kvfs makes itself: remove "
            "it"
        )


def expect_no_other_folders(directory: Path, folders: Iterable[str]) -> None:
    """Raise ConfigError if `directory` has a subdirectory that `folders` lacks. Raises OSError."""
    for name in set(os.listdir(directory)).difference(folders):
        mode = (directory / name).lstat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(
                f"{directory / name} is {stat.filemode(mode)}, expected a file that kvfs makes "
                "itself: remove it"
            )


def inside(root: Path, name: str) -> Path:
    """Return the path of `name` in the directory `root`. The name comes from a file's content.

    Raises ConfigError if the name is not plain. For example, a slash may lead out of `root`.
    """
    if not _PLAIN.fullmatch(name):
        raise wrong(
            root, name, "the name of a file in it", "restore the damaged file that has this name"
        )
    return root / name
