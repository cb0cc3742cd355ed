"""The one table from domain errors to errno.

Every class of `kvfs.errors` that an operation can raise is in it, which a test checks. What is not
a domain error is a defect of kvfs: EIO, with its traceback in the log.
"""

import errno

from kvfs import errors

ERRNO: dict[type[errors.KvfsError], int] = {
    errors.NotFoundError: errno.ENOENT,
    errors.StaleError: errno.ESTALE,  # makes the kernel look the name up again: mostly ENOENT
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
    errors.SpecMismatchError: errno.EINVAL,
    errors.ControlError: errno.EIO,
}


def errno_of(error: errors.KvfsError) -> int:
    """The errno of an error's class, or of the nearest class above it."""
    for cls in type(error).__mro__:
        if cls in ERRNO:
            return ERRNO[cls]
    return errno.EIO
