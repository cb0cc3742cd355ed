"""All errors that kvfs itself can raise.

The layers below the kernel's interface raise these and nothing else. `kvfs.fuse.errnos` turns them
into errno values, in one exhaustive table. A message names the thing, the value, the expected one
and, where there is one, the cure. Not for errors of the Python program itself.
"""

DEFECT = "defect"  # counted for an exception that is none of these


class KvfsError(Exception):
    """The root of all domain errors."""


class ConfigError(KvfsError):
    """A refusal before any change. The command line prints it and exits with 2."""


class InUseError(ConfigError):
    """A directory belongs to a running kvfs; `holder` identifies it in its own words."""

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class UsageError(ConfigError):
    """The caller asked for what does not fit to this directory. `kvfs fsck`, too, exits with 2."""


class SpecMismatchError(ConfigError):
    """A directory has blocks of another model, dtype or layout; the text has both fingerprints."""


class ControlError(KvfsError):
    """The daemon behind a mount point could not be asked, or refused the request."""


class NotFoundError(KvfsError):
    """No such name, or an object whose bytes cannot be produced: a miss."""


class StaleError(KvfsError):
    """The inode is gone; the kernel should look its name up again."""


class ExistsError(KvfsError):
    """The name is taken."""


class NotADirError(KvfsError):
    """A directory was expected."""


class IsADirError(KvfsError):
    """Anything but a directory was expected."""


class NotEmptyError(KvfsError):
    """The directory has entries."""


class NameTooLongError(KvfsError):
    """A name of more than 255 bytes, or a link target of more than 4095."""


class TooManyLinksError(KvfsError):
    """One more name than an inode may have."""


class TooManyOpenError(KvfsError):
    """All handle slots, or all of something else that the users of a mount share, are taken."""


class UserLimitError(KvfsError):
    """One user has used up his part of the resources that all users of a mount share."""


class InvalidError(KvfsError):
    """An argument that no file system would accept."""


class UnsupportedError(KvfsError):
    """Something that kvfs does not do."""


class NotPermittedError(KvfsError):
    """Forbidden for every user."""


class NoSpaceError(KvfsError):
    """No more bytes fit, and no object may be dropped."""

    def __init__(self, message: str, *, because: str = "") -> None:
        """because: what holds the room, in a word or some."""
        super().__init__(message)
        self.because = because


class OtherNamespaceError(KvfsError):
    """The operation would put one object into two namespaces: make a copy."""


class QuotaError(KvfsError):
    """A namespace has reached its quota, and none of its objects may be dropped."""

    def __init__(self, message: str, *, because: str = "") -> None:
        """because: what made it beyond the bytes there, in a word or two."""
        super().__init__(message)
        self.because = because


class TooLargeError(KvfsError):
    """A file size beyond what a file may have."""


class NoAttributeError(KvfsError):
    """The inode has no such extended attribute."""


class AttributeTooLargeError(KvfsError):
    """An extended attribute beyond its limits."""


class TierError(KvfsError):
    """The storage under a tier failed; names the tier, the operation and the cause."""


class CatalogError(KvfsError):
    """The catalog could not be read or written."""
