"""Names the users of a mount for a message: from /proc of other processes, and from exports.

Contract: it follows no path on a mount, because that would ask the daemon, or hang. It only reads
the links of proc(5), and opens their targets with O_PATH, which asks nothing. It does not find a
process that is not visible from here. It names no process of any kvfs: these have files open on
private mounts. Not for ending a process.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

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
        return any(_mount_number(link) == number for link in _inside(process, Path(mount.path)))

    above = (f"the mount on {one.path}" for one in mounts() if one.parent == number)
    return ", ".join([*sorted(_names(blocks)), *above])


def of_detached() -> str:
    """Name the processes with a file open on a detached mount, without saying on which one.

    Empty: there is none. A program may have files of another mount namespace open, so a mount of
    any namespace is attached.
    """
    attached: set[str] = set()
    for process in _namespaces():
        attached |= _mount_ids(process)

    def inside(process: Path) -> bool:
        return bool(attached) and bool(_ids_of_files(process) - attached)

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


def _inside(process: Path, mountpoint: Path) -> Iterator[Path]:
    """The links of a process that lead to a path on this mount point."""
    links = [process / "cwd", process / "root", *_entries(process / "fd")]
    for link in (*links, *_entries(process / "map_files")):
        if (where := _target(link)) and Path(where).is_relative_to(mountpoint):
            yield link


def _mount_number(link: Path) -> int:
    """The number of the mount that a link of proc(5) leads to; 0 if this user may not know it."""
    try:
        there = os.open(link, os.O_PATH | os.O_CLOEXEC)  # such a link asks no daemon for a name
    except OSError:  # it ended or was closed meanwhile, or is another user's
        return 0
    try:
        found = _MOUNT_ID.search((PROC / "self/fdinfo" / str(there)).read_text())
    finally:
        os.close(there)
    return int(found[1]) if found else 0


def _mount_ids(process: Path) -> set[str]:
    """The numbers of the mounts in the namespace of a process."""
    try:
        table = (process / "mountinfo").read_text(errors="replace").split("\n")[:-1]
    except OSError:  # it has ended meanwhile
        return set()
    return {line.partition(" ")[0] for line in table}


def _ids_of_files(process: Path) -> set[str]:
    """The numbers of the mounts of a process's open files."""
    found = set[str]()
    for one in _entries(process / "fd"):
        if (where := _target(one)).startswith("/") and not _KERNELS.match(where):
            with contextlib.suppress(OSError):  # it is closed meanwhile, or is another user's
                info = (process / "fdinfo" / one.name).read_text()
                found.update(_MOUNT_ID.findall(info))
    return found


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
