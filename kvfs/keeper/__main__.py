"""The process that `kvfs mount` starts: configuration on stdin, one line of JSON on stdout.

The line says that the mount is ready, or gives the reason why not. People run `kvfs mount` instead.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import logging.handlers
import os
import shutil
import socket
import sys
from pathlib import Path

from kvfs import own_files, runtime
from kvfs.errors import ConfigError, KvfsError
from kvfs.keeper.keeper import Keeper
from kvfs.keeper.process import DaemonFailed

FOLDERS = ("control", "match", "nginx")  # in the runtime directory; all else there is a file
OOM_SCORE = "-900"  # its death costs the mount, and frees little memory
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Keep the mount, and return when it is gone."""
    os.umask(0o077)  # all files of a mount are only for its user, because the log has names
    foreground = sys.argv[1:] == ["--foreground"]
    config = json.loads(sys.stdin.read())
    mountpoint = Path(config["mountpoint"])

    def refuse(error: Exception, code: int) -> int:
        if foreground:
            sys.stderr.write(f"kvfs: {error}\n")
        else:
            _say({"error": str(error), "exit": code})
        return code

    try:
        directory = runtime.make_private(runtime.runtime_dir(mountpoint))
        lock = _lock(directory, mountpoint)
        own_files.expect_no_other_folders(directory, FOLDERS)
        _end_nginx(directory)
        log_file = _start_log(Path(config["log"] or runtime.log_path(mountpoint)))
        own_files.write(directory / "config", json.dumps(config))
    except (ConfigError, OSError) as error:
        return refuse(error, 2)
    # Movers of a daemon that died become children of this process, which waits for them.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    keeper = Keeper(config, [sys.executable, "-m", "kvfs.daemon"], log_file)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        path = runtime.keeper_path(mountpoint)
        path.unlink(missing_ok=True)
        control.bind(str(path))
        control.listen(8)
        try:
            try:
                keeper.start()
            except (DaemonFailed, KvfsError) as error:
                return refuse(error, error.exit if isinstance(error, DaemonFailed) else 1)
            if foreground:
                sys.stdout.write(f"{mountpoint}: mounted\n")
                sys.stdout.flush()
            else:
                _say({"ready": True})
                _leave_terminal(log_file)
            return keeper.run(control)
        finally:
            with contextlib.suppress(ConfigError, OSError):
                _end_nginx(directory)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _leave_terminal(log_file: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, instead in ((0, null), (1, null), (2, log_file)):
        os.dup2(instead, descriptor)
    os.close(null)


def _lock(directory: Path, mountpoint: Path) -> int:
    """Lock the mount for this keeper. Raises ConfigError if another keeper has the lock."""
    flags = os.O_RDWR | os.O_CREAT
    lock = own_files.open_regular(
        directory / "lock", flags, "the number of its keeper", "remove it"
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 20, 0).decode("ascii", "backslashreplace").strip() or "unknown"
        raise ConfigError(
            f"{mountpoint} belongs to another kvfs (process {holder}): unmount it first"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _end_nginx(directory: Path) -> None:
    """End the nginx of a daemon that was killed. Nothing names it once `directory` is removed.

    Raises ConfigError.
    """
    if (directory / "nginx/pid").exists():
        from kvfs.pool.nginx import Nginx  # noqa: PLC0415 (a keeper without a pool needs none of it)

        Nginx(directory / "nginx").stop()


def _start_log(path: Path) -> int:
    """Log into the daemon's file, which the daemon rotates.

    Returns a descriptor of the file, for the standard error of the keeper and of daemons.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[logging.handlers.WatchedFileHandler(path)],
    )
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
