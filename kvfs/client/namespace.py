"""A cache's directory: found or made, and checked for the spec of its blocks.

Contract: a directory with another fingerprint is refused. On a kvfs mount the fingerprint is the
setting `fingerprint` of the namespace. Elsewhere it is an extended attribute of the same name, if
the file system has such. A directory without a fingerprint is accepted: keys of different specs
never meet. Not for blocks.
"""

import contextlib
import errno
import os
import stat

from kvfs.client.spec import Spec
from kvfs.errors import SpecMismatchError

FINGERPRINT = "user.kvfs.fingerprint"
PREFIX = "user.kvfs.prefix"
PUBLISH = "user.kvfs.publish"
_COMPUTED = "user.kvfs.warm"
_LONGEST = 2048  # bytes, as kvfs/settings.py has it; a fingerprint's text is ASCII
# The attribute does not exist, or the file system, or another version of kvfs, does not know it.
_NONE = {errno.ENODATA, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES}


def open_namespace(path: str, spec: Spec, *, create: bool) -> bool:
    """Return whether the file system itself makes directories with their blocks.

    create: make the directory if it does not exist. An empty one without a fingerprint gets the
    fingerprint, and `prefix` on, if the file system can store them. Raises OSError and
    SpecMismatchError.
    """
    if create and not os.path.ismount(path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if os.path.isdir(path) and not _get(path, FINGERPRINT) and not os.listdir(path):
            if _is_kvfs(path) and _get(path, PREFIX):
                _set(path, PREFIX, "on")
            _set(path, FINGERPRINT, _recorded(spec))
    try:
        found_mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "expected the namespace's directory (create=True makes it)", path
        ) from None
    if not stat.S_ISDIR(found_mode):
        raise NotADirectoryError(errno.ENOTDIR, "expected a directory", path)
    if _is_kvfs(path) and os.path.ismount(path):
        raise ValueError(f"path={path!r}: expected a namespace, a directory of this mount")
    wanted, found = _recorded(spec), _get(path, FINGERPRINT)
    if found and found != wanted:
        raise SpecMismatchError(
            f"{path} has the blocks of another spec: expected fingerprint {wanted}, got {found}; "
            "give each model, dtype and layout a directory of its own"
        )
    return _is_kvfs(path) and _get(path, PREFIX) == "on"


def names_at_once(path: str) -> bool:
    """Return whether a new file of a kvfs namespace has its name before it is closed.

    False if the namespace is gone.
    """
    with contextlib.suppress(OSError):  # the first write reports it
        return _get(path, PUBLISH) == "immediate"
    return False


def _is_kvfs(path: str) -> bool:
    """Return whether the path is on kvfs, which computes an attribute that no copy has."""
    return bool(_get(path, _COMPUTED))


def _recorded(spec: Spec) -> str:
    """Return the fingerprint as the setting takes it: whole, or its beginning and the root key."""
    text = str(spec.fingerprint)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 33]} {spec.root.hex()}"


def _get(path: str, name: str) -> str:
    try:
        return os.getxattr(path, name).decode(errors="replace")
    except OSError as error:
        if error.errno not in _NONE:
            raise
        return ""


def _set(path: str, name: str, value: str) -> None:
    try:
        os.setxattr(path, name, value.encode())
    except OSError as error:
        if error.errno not in _NONE:
            raise
