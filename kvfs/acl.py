"""Access of one more user to files of kvfs, by POSIX ACLs: tmpfs, ext4, xfs and btrfs have them.

Contract: `allow` and `inherit` add an entry for one user, and keep all other access as it is. They
raise OSError, EOPNOTSUPP for a file system without ACLs.

The server of a pool needs read access to files that kvfs makes later, but must not be root. With a
default ACL a directory passes access on to each new file, also to a temporary one that is renamed.
The kernel then does not apply the umask, but does apply the mode of open(2): so object files are
made with FILE_MODE. In a directory without a default ACL the umask of the daemon (077) leaves 0600.
A group instead would need another umask, and would give the files to all programs of that group. A
capability would let the server read the whole machine.
"""

import errno
import os
import struct
from pathlib import Path
from typing import NamedTuple

READ, WRITE, PASS = 4, 2, 1  # of files; of sockets; of directories
FILE_MODE = 0o640  # what open(2) gets for an object file

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_HEADER, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_VERSION = 2
_OWNER, _USER, _GROUP, _SOME_GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_MASKED = {_USER, _GROUP, _SOME_GROUP}  # what the mask limits
_NOBODY = 0xFFFFFFFF  # the id in an entry that needs none


class Entry(NamedTuple):
    """An entry of acl(5): whose it is, its permissions, and the id of a named user or group."""

    tag: int
    perms: int
    id: int


def allow(path: str | Path, uid: int, perms: int) -> None:
    """Give a user these permissions, and keep those that he has. Raises OSError."""
    entries = _entries(path)
    now = {(one.tag, one.id): one for one in entries}
    wanted = now.get((_USER, uid), Entry(_USER, 0, uid)).perms | perms
    if now.get((_USER, uid)) != (_USER, wanted, uid):
        now[_USER, uid] = Entry(_USER, wanted, uid)
        _set(path, _ACCESS, list(now.values()))


def inherit(folder: str | Path, uid: int, perms: int) -> None:
    """Give a user these permissions for all files that are made in a folder. Raises OSError."""
    entries = [Entry(_OWNER, 7, _NOBODY), Entry(_GROUP, 0, _NOBODY), Entry(_OTHER, 0, _NOBODY)]
    _set(folder, _DEFAULT, [*entries, Entry(_USER, perms, uid)])


def has(path: str | Path, uid: int) -> bool:
    """Whether the user has an entry. Raises OSError."""
    return any((one.tag, one.id) == (_USER, uid) for one in _entries(path))


def passes(folder: Path, uid: int) -> bool:
    """Whether a user may pass a folder, as its owner, by an entry, or as everybody. OSError."""
    entries = _entries(folder)
    own = [one for one in entries if (one.tag, one.id) == (_USER, uid)]
    if folder.stat().st_uid == uid:
        own = [one for one in entries if one.tag == _OWNER]
    judged = own or [one for one in entries if one.tag == _OTHER]
    return all(one.perms & PASS for one in judged)


def remove(path: str | Path) -> None:
    """Leave only the mode of a file, and no access for its group. Raises OSError."""
    mode = os.stat(path).st_mode
    try:
        os.removexattr(path, _ACCESS)
    except OSError as error:
        if error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}:
            raise
        return
    os.chmod(path, mode & 0o7707)  # the group's bits were the mask of the entries


def _entries(path: str | Path) -> list[Entry]:
    """Return the entries of a file, as far as they give access. Raises OSError."""
    try:
        raw = os.getxattr(path, _ACCESS)
    except OSError as error:
        if error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}:
            raise
        mode = os.stat(path).st_mode
        bits = ((_OWNER, mode >> 6), (_GROUP, mode >> 3), (_OTHER, mode))
        return [Entry(tag, perms & 7, _NOBODY) for tag, perms in bits]
    found = [Entry(*one) for one in _ENTRY.iter_unpack(raw[_HEADER.size :])]
    mask = next((one.perms for one in found if one.tag == _MASK), 7)
    return [
        one._replace(perms=one.perms & mask) if one.tag in _MASKED else one
        for one in found
        if one.tag != _MASK
    ]


def _set(path: str | Path, name: str, entries: list[Entry]) -> None:
    """Set an ACL with a mask that keeps all that the entries give."""
    perms = 0
    for one in entries:
        perms |= one.perms if one.tag in _MASKED else 0
    ordered = sorted([*entries, Entry(_MASK, perms, _NOBODY)])
    os.setxattr(path, name, _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*e) for e in ordered))
