"""Names the users of a mount for a message: from /proc of other processes, and from exports.

Contract: it follows no path on a mount, because that would ask the daemon, or hang. It only reads
the links of proc(5), and opens their targets with O_PATH, which asks nothing. It does not find a
process that is not visible from here. It names no process of any kvfs: these have files open on
private mounts. Not for ending a process.
"""

import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvfs.mounts import device as device_of
from kvfs.nfs.servers import Ganesha, KernelNfsServer
from kvfs.runtime import FSTYPE, PROC, MountEntry, mounts, mounts_of

UNSEEN = "a process that is not visible from here"
# Files without a name on mounts of the kernel's own, which are in no table either.
_KERNELS = re.compile(r"/(memfd:|SYSV|dev/zero|\[|anon_hugepage|dmabuf)")

_MOUNT_ID = re.compile(r"^mnt_id:\t(\d+)$", re.MULTILINE)  # of proc_pid_fdinfo(5)


def end_of_export(mountpoint: Path) -> str:
    """Return the command that ends an export of this mount point, or nothing."""
    if Ganesha(mountpoint).pid():
        return f"kvfs export --stop {mountpoint}"
    if KernelNfsServer(mountpoint).file.exists():
        return f"kvfs export --knfsd --stop {mountpoint}"
    return ""


def of_mount(mountpoint: Path) -> str:
    """Name the processes with something open there, in any mount namespace."""
    return ", ".join(sorted(_names(lambda process: any(_inside(process, mountpoint))))) or UNSEEN


def blocking(mount: MountEntry) -> str:
    """Name the processes and mounts for which the kernel refuses to unmount this mount.

    Empty: none of them is visible, and the kernel may still refuse. A copy of the mount in another
    namespace has another number, so a process there does not count.
    """
    number = mount.number

    def blocks(process: Path) -> bool:
        links = _inside(process, Path(mount.path))
        return any(place.number == number for link in links if (place := _place(link)))

    above = (f"the mount on {one.path}" for one in mounts() if one.parent == number)
    return ", ".join([*sorted(_names(blocks)), *above])


def of_detached(device: str) -> str:
    """Name the processes with something open on a detached mount: that of this file system.

    device: MAJOR:MINOR; "" for files of any detached mount. Empty: there is none. A program may
    have files of another mount namespace open, so a mount of any namespace is attached.
    """
    attached: set[int] = set()
    for process in _namespaces():
        attached |= _mount_numbers(process)

    def on_it(link: Path) -> bool:
        where = _target(link)
        if not where.startswith("/") or _KERNELS.match(where) or not (place := _place(link)):
            return False
        return place.number not in attached and device in {"", place.device}

    def inside(process: Path) -> bool:
        return bool(attached) and any(map(on_it, _links(process, device)))

    return ", ".join(sorted(_names(inside)))


def of_copies(mountpoint: Path, device: str = "") -> str:
    """Name a process in each other mount namespace that still has this mount; empty: there is none.

    A container may have such a copy. `device` finds it at other paths, too.
    """
    here = _target(PROC / "self/ns/mnt")
    others = {process for process in _namespaces() if _target(process / "ns/mnt") != here}

    def has_copy(process: Path) -> bool:
        try:
            return process in others and any(
                one.fstype == FSTYPE and (one.path == str(mountpoint) or one.device == device)
                for one in mounts_of(process)
            )
        except OSError:  # it has ended meanwhile
            return False

    return ", ".join(sorted(_names(has_copy)))


def _namespaces() -> Iterator[Path]:
    """One process of each mount namespace, preferably one that is not of a kvfs."""
    found: dict[str, Path] = {}
    for process in PROC.glob("[0-9]*"):
        namespace = _target(process / "ns/mnt")
        if namespace and (namespace not in found or _is_kvfs(found[namespace])):
            found[namespace] = process
    yield from found.values()


def _names(wanted: Callable[[Path], bool]) -> Iterator[str]:
    for process in PROC.glob("[0-9]*"):
        if not _is_kvfs(process) and wanted(process):
            try:
                yield f"{(process / 'comm').read_text().strip()} ({process.name})"
            except OSError:  # it has ended meanwhile
                continue


def _is_kvfs(process: Path) -> bool:
    """Whether it is a keeper, a daemon, a mover in the session of its daemon, or this process."""
    if process.name == str(os.getpid()):
        return True
    try:
        # proc(5): the session is the fourth field after the name, which may have any bytes.
        session = (process / "stat").read_bytes().rpartition(b")")[2].split()[3]
    except (OSError, IndexError):  # it ended meanwhile
        return False
    return any(map(_runs_kvfs, (process, PROC / session.decode())))


def _runs_kvfs(process: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(one == b"-m" and of.startswith(b"kvfs.") for one, of in pairwise(words))


def _links(process: Path, device: str | None = None) -> Iterator[Path]:
    """The links of a process to all that it has open, mapped, or as a directory of its own.

    device: leave mappings out if none is of this file system: a process has hundreds of others.
    """
    yield from (process / "cwd", process / "root")
    yield from _entries(process / "fd")
    if device is None or _maps(process, device):
        yield from _entries(process / "map_files")


def _maps(process: Path, device: str) -> bool:
    """Whether a process has a file of this file system mapped."""
    if not device:
        return False
    major, minor = map(int, device.split(":"))
    try:
        return f" {major:02x}:{minor:02x} ".encode() in (process / "maps").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return False


def _inside(process: Path, mountpoint: Path) -> Iterator[Path]:
    """The links of a process that lead to a path on this mount point."""
    for link in _links(process):
        if (where := _target(link)) and Path(where).is_relative_to(mountpoint):
            yield link


class _Place(NamedTuple):
    """The mount and the file system, MAJOR:MINOR, of an open file."""

    number: int
    device: str


def _place(link: Path) -> _Place | None:
    """The place that a link of proc(5) leads to; None if this user may not know it."""
    try:
        there = os.open(link, os.O_PATH | os.O_CLOEXEC)  # such a link asks no daemon for a name
    except OSError:  # it ended or was closed meanwhile, or is another user's
        return None
    try:
        found = _MOUNT_ID.search((PROC / "self/fdinfo" / str(there)).read_text())
        return _Place(int(found[1]), device_of(there)) if found else None
    finally:
        os.close(there)


def _mount_numbers(process: Path) -> set[int]:
    """The numbers of the mounts in the namespace of a process."""
    try:
        return {one.number for one in mounts_of(process)}
    except OSError:  # it has ended meanwhile
        return set()


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # it ended meanwhile, or is another user's
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
