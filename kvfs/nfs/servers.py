"""The NFS servers of a mount, started, found and stopped: one nfs-ganesha, or the kernel's.

Contract: `start` of nfs-ganesha returns when the server answers and has the mount open, or raises.
ConfigError has the obstacle, KvfsError another reason of the server's death; then nothing of the
server is left. Each time the kernel says whether the server runs: a number in a file counts only if
that process has our configuration. One machine has one server for each mount point. Not for the
servers' configuration: `export`.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kvfs import own_files, runtime
from kvfs.errors import ConfigError, KvfsError
from kvfs.nfs.export import Export, NfsServer

RUN = Path("/run/kvfs-nfs")
LOGS = Path("/var/log/kvfs-nfs")
PROGRAM = "ganesha.nfsd"
FSAL = "libfsalvfs.so"
PACKAGES = "apt-get install nfs-ganesha nfs-ganesha-vfs"
EXPORTS = Path("/etc/exports.d")
EXPORTFS = "exportfs"
RPCBIND = Path("/run/rpcbind.sock")
NFS, NULL = 100003, 0  # of RFC 5531: its program, and the procedure that does nothing
START_S = 60.0
STOP_S = 30.0  # then it is killed; no client loses an answered call
POLL_S = 0.05


class Ganesha:
    """The nfs-ganesha of the mount at `mountpoint`, whether it runs or not."""

    def __init__(self, mountpoint: Path, *, run: Path = RUN, logs: Path = LOGS) -> None:
        name = runtime.escape(mountpoint)
        self.mountpoint = mountpoint
        self.folder = run / name
        self.config = self.folder / "ganesha.conf"
        self.pid_file = self.folder / "pid"
        self.log = logs / f"{name}.log"

    def pid(self) -> int:
        """Return the server's process number; 0 if it does not run."""
        try:
            pid = int(own_files.read(self.pid_file, "the number of a process", "") or "0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (ConfigError, OSError, ValueError):
            return 0
        return pid if os.fsencode(self.config) in words else 0

    def start(self, export: Export, address: str, port: int, mountd_port: int) -> bool:
        """Start the server; False if it runs already with this export. mountd_port 0: no NFSv3."""
        if os.geteuid() != 0:
            raise ConfigError("--start needs root: an NFS server opens files by their handles")
        check_installed()
        if mountd_port:
            with socket.socket(socket.AF_UNIX) as trying:
                if trying.connect_ex(str(RPCBIND)):
                    raise ConfigError(
                        "--v3 needs rpcbind, which does not run: apt-get install rpcbind and start "
                        "it, or export without --v3"
                    )
        server = NfsServer(address, port, mountd_port, self.folder)
        text = export.ganesha(server)
        runtime.make_private(self.log.parent)
        with _alone(self.folder):
            if pid := self.pid():
                cure = f"kvfs export --stop {self.mountpoint}, then --start"
                told = own_files.read(self.config, "the configuration of a server", cure)
                if told == text and self._serves(pid):
                    return False
                raise ConfigError(
                    f"{self.mountpoint} is exported already, with other options, by process {pid}: "
                    f"run kvfs export --stop {self.mountpoint} first"
                )
            try:
                for one in filter(None, (port, mountd_port)):
                    check_free(address, one)
                own_files.write(self.config, text)
                self._run(server)
            except BaseException:
                self._clear()
                raise
        return True

    def _run(self, server: NfsServer) -> None:
        with open(os.devnull, "r+b") as null, self.log.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [
                    *(PROGRAM, "-F", "-f", self.config, "-L", self.log),
                    *("-p", self.pid_file, "-N", "NIV_EVENT"),
                ],
                cwd="/",
                stdin=null,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        try:
            while not (_answers(server) and self._serves(process.pid)):
                if process.poll() is not None:
                    raise KvfsError(
                        f"{PROGRAM} ended with {process.returncode}: {self._reason(begin)}"
                    )
                if time.monotonic() > deadline:
                    raise KvfsError(
                        f"{PROGRAM} did not serve {self.mountpoint} within {START_S:.0f} s: "
                        f"{self._reason(begin)}"
                    )
                time.sleep(POLL_S)
            if wrong := [line for line in self._log_lines(begin) if " :CONFIG :CRIT :" in line]:
                raise KvfsError(f"{PROGRAM} refuses its configuration: {wrong[0]}")
        except BaseException:
            process.kill()
            process.wait()
            raise

    def _reason(self, begin: int) -> str:
        """Return the last complaint in the log since that offset."""
        said = self._log_lines(begin)
        loud = [line for line in said if " :CRIT :" in line or " :MAJ :" in line]
        loud = [line for line in loud if ":DBUS :" not in line]  # it does without
        last = [*said, *loud] or ["it said nothing"]
        return f"{last[-1]}; see {self.log}"

    def _log_lines(self, begin: int) -> list[str]:
        """Return the lines of the log since that offset, without time, host and process."""
        with self.log.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").splitlines()
        return [line.rpartition("] ")[2] for line in lines]

    def _serves(self, pid: int) -> bool:
        """Return whether it holds the present mount, and not one that was detached."""
        wanted = f"mnt_id:\t{runtime.mount_id(self.mountpoint)}\n"
        try:
            held = [path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()]
        except OSError:  # it ended, or closed one meanwhile
            return False
        return any(wanted in text for text in held)

    def stop(self) -> bool:
        """Stop the server; False if it had ended. Raises ConfigError if none was started."""
        if os.geteuid() != 0:
            raise ConfigError("--stop needs root")
        if not self.folder.is_dir():
            raise ConfigError(
                f"{self.mountpoint} is not exported by {PROGRAM}: nothing to stop (--knfsd --stop "
                "ends an export by the kernel's server)"
            )
        with _alone(self.folder):
            pid = self.pid()
            if pid:
                self._end(pid)
            self._clear()
        return bool(pid)

    @staticmethod
    def _end(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as ending:
            watched = os.pidfd_open(pid)
            ending.callback(os.close, watched)
            os.kill(pid, signal.SIGTERM)
            if not select.select([watched], [], [], STOP_S)[0]:
                os.kill(pid, signal.SIGKILL)
                select.select([watched], [], [])

    def _clear(self) -> None:
        """Remove the files of a server that has ended, and their parent if it is empty."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # other mounts are exported
            self.folder.parent.rmdir()


class KernelNfsServer:
    """The kernel's server: one file in /etc/exports.d for one mount, which exportfs(8) reads.

    Its threads and versions are the system's (nfs.conf(5)). `folder` and `proc` are for tests.
    """

    def __init__(
        self, mountpoint: Path, *, folder: Path = EXPORTS, proc: Path = runtime.PROC
    ) -> None:
        self.mountpoint = mountpoint
        self.file = folder / f"kvfs-{runtime.escape(mountpoint)}.exports"
        self.proc = proc

    def start(self, export: Export) -> bool:
        """Export the mount; False if it is exported so already. ConfigError: no such server."""
        if os.geteuid() != 0:
            raise ConfigError("--start needs root")
        if "\tnfsd\n" not in (self.proc / "filesystems").read_text():
            raise ConfigError(
                "this kernel has no NFS server (no nfsd in /proc/filesystems): modprobe nfsd, or "
                "export with --ganesha"
            )
        if shutil.which(EXPORTFS) is None:
            raise ConfigError(f"{EXPORTFS} is not installed: apt-get install nfs-kernel-server")
        text = export.line()
        cure = f"remove it, or run kvfs export --knfsd --stop {self.mountpoint}"
        found = own_files.read(self.file, "a line of exports(5)", cure)
        if found is not None:
            if found == text:
                return False
            raise ConfigError(
                f"{self.mountpoint} is exported already, with other options, by {self.file}: "
                f"run kvfs export --knfsd --stop {self.mountpoint} first"
            )
        self.file.parent.mkdir(exist_ok=True)
        own_files.write(self.file, text)
        try:
            self._tell()
        except KvfsError:
            self.file.unlink()
            raise
        return True

    def stop(self) -> None:
        """End the export. Raises ConfigError if the mount is not exported."""
        if not self.file.exists():
            raise ConfigError(f"{self.mountpoint} is not exported: there is no {self.file}")
        self.file.unlink()
        self._tell()

    @staticmethod
    def _tell() -> None:
        done = subprocess.run([EXPORTFS, "-ra"], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip() or f"it exited with {done.returncode}"
            raise KvfsError(f"{EXPORTFS} -ra failed: {reason}")


def check_installed() -> None:
    """Raises ConfigError if nfs-ganesha or its FSAL is not installed."""
    if shutil.which(PROGRAM) is None:
        raise ConfigError(f"{PROGRAM} is not installed: {PACKAGES}")
    roots = (Path("/usr/lib"), Path("/usr/lib64"))
    if not any(any(root.glob(f"{where}ganesha/{FSAL}")) for root in roots for where in ("", "*/")):
        raise ConfigError(f"{PROGRAM} has no {FSAL}: {PACKAGES}")


def check_free(address: str, port: int) -> None:
    """Raises ConfigError, with the process that listens there, if the port is taken."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind((address, port))
        except OSError as error:
            who = _listener(port)
            raise ConfigError(
                f"port {port} of {address} cannot be used: {error.strerror}"
                f"{who and f', by {who}'}; choose others with --port and --mountd-port"
            ) from None


def _listener(port: int) -> str:
    """Return the process that listens on a TCP port, as far as we may see it."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in sockets:
                process = link.parents[1]
                return f"{(process / 'comm').read_text().strip()} ({process.name})"
    return ""


def _answers(server: NfsServer) -> bool:
    """Return whether an NFS server answers a call that does nothing."""
    call = b"".join(one.to_bytes(4, "big") for one in (1, 0, 2, NFS, 4, NULL, 0, 0, 0, 0))
    try:
        with socket.create_connection((server.address, server.port), timeout=1.0) as asking:
            asking.sendall((len(call) | 1 << 31).to_bytes(4, "big") + call)
            return bool(asking.recv(4))
    except OSError:
        return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock for one start or stop at a time; the folder exists meanwhile.

    A stop removes the folder with the lock.
    """
    while True:
        runtime.make_private(folder)
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:  # taken away meanwhile
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(lock.fileno()), (folder / "lock").stat()):
                    yield
                    return
            except FileNotFoundError:
                continue
