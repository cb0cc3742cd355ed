"""The table from domain errors to errno, and the text of an operation for the log.

The table has every class of `kvfs.errors` that an operation can raise; a test checks this. Any
other exception is a defect of kvfs: EIO, with its traceback in the log.
"""

import errno
from collections.abc import Iterable

from kvfs import errors

SHOWN = 200  # characters
_PRIVATE = {"write": 2, "setxattr": 2}  # by operation, the argument with users' bytes

ERRNO: dict[type[errors.KvfsError], int] = {
    errors.NotFoundError: errno.ENOENT,
    errors.StaleError: errno.ESTALE,  # makes the kernel look up the name again: mostly ENOENT
    errors.ExistsError: errno.EEXIST,
    errors.NotADirError: errno.ENOTDIR,
    errors.IsADirError: errno.EISDIR,
    errors.NotEmptyError: errno.ENOTEMPTY,
    errors.NameTooLongError: errno.ENAMETOOLONG,
    errors.TooManyLinksError: errno.EMLINK,
    errors.TooManyOpenError: errno.ENFILE,
    errors.UserLimitError: errno.EDQUOT,
    errors.InvalidError: errno.EINVAL,
    errors.UnsupportedError: errno.EOPNOTSUPP,
    errors.NotPermittedError: errno.EPERM,
    errors.NoSpaceError: errno.ENOSPC,
    errors.OtherNamespaceError: errno.EXDEV,
    errors.QuotaError: errno.EDQUOT,
    errors.TooLargeError: errno.EFBIG,
    errors.NoAttributeError: errno.ENODATA,
    errors.AttributeTooLargeError: errno.E2BIG,
    errors.TierError: errno.EIO,
    errors.CatalogError: errno.EIO,
    # Raised before a mount exists, or by the command line; here so that the table is complete.
    errors.ConfigError: errno.EINVAL,
    errors.InUseError: errno.EBUSY,
    errors.UsageError: errno.EINVAL,
    errors.SpecMismatchError: errno.EINVAL,
    errors.ControlError: errno.EIO,
}


def errno_of(error: errors.KvfsError) -> int:
    """The errno of an error's class, or of the nearest class above it."""
    for cls in type(error).__mro__:
        if cls in ERRNO:
            return ERRNO[cls]
    return errno.EIO


def shown(operation: str, arguments: Iterable[object]) -> str:
    """The call in one line of SHOWN printable characters at most, names as Python writes them.

    Users' bytes are left out; only their number is shown.
    """
    private = _PRIVATE.get(operation, -1)
    told = (
        f"<{len(found)} bytes>" if number == private and isinstance(found, bytes) else repr(found)
        for number, found in enumerate(arguments)
    )
    return f"{operation}({', '.join(told)})"[:SHOWN]
