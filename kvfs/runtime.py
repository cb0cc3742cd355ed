"""The paths of a mount's files while it runs, and the resources of this machine.

Paths are functions of the mount point alone, so that the command line finds a daemon without a
request. The facts (mounts, memory, file system types) come from the kernel's own files and are read
anew at each call. Nothing here changes anything, except `make_private`. Nothing touches a mount
point that is mounted: its daemon may be dead, and a request to it would hang.
"""

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from kvfs import own_files
from kvfs.errors import ConfigError

FSTYPE = "fuse.kvfs"
PROC = Path("/proc")
FIRST_CONTROL = 1 << 62  # the inode of .kvfs; those of its files follow

# An AF_UNIX address has 107 bytes; this leaves room for /tmp/kvfs-4294967294/ and /control.sock.
_LONGEST_ESCAPE = 64
_PLAIN = re.compile(rb"[A-Za-z0-9:_.]")
_OCTAL = re.compile(r"\\([0-7]{3})")


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo, as far as kvfs needs it."""

    root: str
    path: str
    fstype: str
    source: str
    super_options: tuple[str, ...]
    number: int = 0
    flags: tuple[str, ...] = ()
    device: str = ""  # of the file system: MAJOR:MINOR, the same in all mount namespaces
    parent: int = 0  # the number of the mount below it

    @property
    def owner(self) -> str:
        """Return the user of a FUSE file system, for a message."""
        return next((one for one in self.super_options if one.startswith("user_id=")), "user_id=?")

    @property
    def words(self) -> frozenset[str]:
        """Return all words of the mount and of its file system; either may be read-only alone."""
        found = frozenset((*self.flags, *self.super_options))
        return found - {"rw"} if "ro" in found else found


def mounts(proc: Path = PROC) -> list[MountEntry]:
    """Return all mounts in this mount namespace, the topmost mount of a path last."""
    return mounts_of(proc / "self")


def mounts_of(process: Path) -> list[MountEntry]:
    """Return all mounts in the mount namespace of a process, given as its directory of proc(5)."""
    found = []
    # Not splitlines: a directory's name may contain characters that end lines for it.
    for line in os.fsdecode((process / "mountinfo").read_bytes()).split("\n")[:-1]:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        root, path = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
        flags, options = (tuple(text.split(",")) for text in (fields[5], rest[2]))
        number, parent, device = int(fields[0]), int(fields[1]), fields[2]
        found.append(
            MountEntry(root, path, rest[0], rest[1], options, number, flags, device, parent)
        )
    return found


def mount_at(path: Path) -> MountEntry | None:
    """Return the mount at exactly this canonical path, or None."""
    return next((mount for mount in reversed(mounts()) if mount.path == str(path)), None)


def mount_id(path: Path, proc: Path = PROC) -> int:
    """Return the kernel's number of the topmost mount at this canonical path, 0 if there is none.

    As in /proc/PID/fdinfo. It may be given out again after an unmount.
    """
    return next((one.number for one in reversed(mounts(proc)) if one.path == str(path)), 0)


def kvfs_holding(path: Path) -> MountEntry | None:
    """Return the kvfs that a canonical path is on, or None."""
    above = {str(path), *map(str, path.parents)}
    found = [mount for mount in mounts() if mount.path in above]
    nearest = max(reversed(found), key=lambda mount: len(mount.path), default=None)
    return nearest if nearest is not None and nearest.fstype == FSTYPE else None


def is_control_file(ino: int) -> bool:
    """Return whether this is the number of `.kvfs` or of a file in it, on a mount of kvfs."""
    return ino >= FIRST_CONTROL


def kvfs_mount(mountpoint: Path) -> MountEntry:
    """Return the kvfs mount at this canonical path. ConfigError says what is there instead."""
    mount = mount_at(mountpoint)
    if mount is None:
        raise ConfigError(f"{mountpoint} is not a mount point; mounts of kvfs: {list_mounts()}")
    if mount.fstype != FSTYPE:
        raise ConfigError(f"{mountpoint} is a mount of type {mount.fstype}, expected {FSTYPE}")
    return mount


def list_mounts() -> str:
    """Return the mount points of all kvfs, for a message."""
    return ", ".join(mount.path for mount in mounts() if mount.fstype == FSTYPE) or "none"


def canonical(path: str | os.PathLike[str]) -> Path:
    """Return the path under which the kernel lists a mount point, without touching a mount."""
    parent, name = os.path.split(os.path.join(os.getcwd(), os.fspath(path).rstrip("/") or "/"))
    if name not in {"", ".", ".."}:
        here = Path(os.path.realpath(parent), name)
        if mount_at(here):
            return here
    return Path(os.path.realpath(path))


def escape(mountpoint: Path) -> str:
    r"""Return one file name for an absolute path, unique to it: /mnt/kv-1 -> mnt-kv\x2d1.

    The rules are those of `systemd-escape --path`. A name that is too long for a socket's address
    ends in a hash behind a `~`, which the rules never produce.
    """
    path = os.path.normpath(os.fsencode(mountpoint)).strip(b"/")
    if not path:
        return "-"
    text = "".join(
        "-" if byte == b"/" else byte.decode() if _PLAIN.match(byte) else f"\\x{byte[0]:02x}"
        for byte in (path[i : i + 1] for i in range(len(path)))
    )
    if text.startswith("."):
        text = f"\\x2e{text[1:]}"
    if len(text) > _LONGEST_ESCAPE:
        import hashlib  # noqa: PLC0415 (4 MB of libcrypto, which the keeper would hold for nothing)

        digest = hashlib.sha256(path).hexdigest()[:24]
        text = f"{text[: _LONGEST_ESCAPE - 1 - len(digest)]}~{digest}"
    return text


def runtime_dir(mountpoint: Path) -> Path:
    """Return the directory of this mount's socket and other state that a reboot may forget."""
    if os.geteuid() == 0:
        return Path("/run/kvfs", escape(mountpoint))
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given, "kvfs", escape(mountpoint))
    return Path(f"/tmp/kvfs-{os.geteuid()}", escape(mountpoint))  # noqa: S108 - see make_private


def runtime_dirs() -> list[Path]:
    """Return the runtime directories of this user's mounts, and of those that died."""
    parent = runtime_dir(Path("/")).parent
    return sorted(parent.iterdir()) if parent.is_dir() else []


def socket_path(mountpoint: Path) -> Path:
    """Return the socket on which the daemon behind this mount point listens."""
    return runtime_dir(mountpoint) / "control.sock"


def keeper_path(mountpoint: Path) -> Path:
    """Return the socket on which the keeper of this mount listens."""
    return runtime_dir(mountpoint) / "keeper.sock"


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Return the identity of this machine, or container: its id, if it has one, and its name.

    Containers of one image may share the id, and those of one host its name.
    """
    try:
        number = Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        number = ""
    return f"{number}:{platform.node()}"


def log_path(mountpoint: Path) -> Path:
    """Return the default log file of this mount."""
    if os.geteuid() == 0:
        return Path("/var/log/kvfs", f"{escape(mountpoint)}.log")
    return runtime_dir(mountpoint) / "kvfs.log"


def ram_root() -> Path:
    """Return the parent directory of RAM tiers: each a tmpfs of its own, or shared without root."""
    return Path("/run/kvfs-ram" if os.geteuid() == 0 else f"/dev/shm/kvfs-{os.geteuid()}")  # noqa: S108 - see make_private


def ram_path(identity: str) -> Path:
    """Return the path of the RAM tier of this identity. ConfigError: the identity is no name."""
    return own_files.inside(ram_root(), identity)


def make_private(directory: Path) -> Path:
    """Create a directory for this user alone, its kvfs parent too; refuse another user's.

    Under /tmp and /dev/shm any user could have created the name before us.
    """
    for made in (directory.parent, directory):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = made.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(
                f"{made} must belong to uid {os.geteuid()}, and no other user may write to it: "
                "remove it, or set XDG_RUNTIME_DIR"
            )
    return directory


def memory(proc: Path = PROC) -> int:
    """Return the bytes of memory this process may use: the machine's, or its cgroup's."""
    return min([_meminfo(proc, "MemTotal"), *_cgroup_limits(proc)])


def available_memory(proc: Path = PROC) -> int:
    """Return the bytes that are free without swapping, by the kernel's estimate."""
    return min([_meminfo(proc, "MemAvailable"), *_cgroup_limits(proc)])


def _meminfo(proc: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise ConfigError(f"{proc}/meminfo has no {name}: mount the proc file system there")
    return int(found[1]) * 1024


def _cgroup_limits(proc: Path) -> list[int]:
    """Return the memory limits of this process's cgroup and of all above it, v1 and v2."""
    groups = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            groups[controllers] = path
    limits = []
    for mount in mounts(proc):
        for controllers, path in groups.items():
            if controllers and mount.fstype == "cgroup" and "memory" in mount.super_options:
                limits += _limits_upward(mount, path, "memory.limit_in_bytes")
            elif not controllers and mount.fstype == "cgroup2":
                limits += _limits_upward(mount, path, "memory.max")
    return limits


def _limits_upward(mount: MountEntry, path: str, name: str) -> list[int]:
    # Inside a container the mount may show only a part of the tree, beginning at `root`.
    below = os.path.relpath(path, mount.root)
    group = Path(mount.path) if below.startswith("..") else Path(mount.path, below)
    limits = []
    for directory in (group, *group.parents):
        try:
            text = (directory / name).read_text().strip()
        except OSError:  # the root group has no limit, and above the mount there is no group
            continue
        if text.isdecimal():
            limits.append(int(text))
    return limits


def filesystem_magic(path: Path) -> int:
    """Return statfs(2)'s f_type, which os.statvfs leaves out."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(512)  # struct statfs: 120 bytes, and f_type comes first
    if libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
