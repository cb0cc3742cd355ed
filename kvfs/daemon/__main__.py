"""The process that the keeper starts: it loads its code, waits for the order, and serves."""

import errno
import faulthandler
import json
import logging
import logging.handlers
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import trio

from kvfs import __version__, runtime
from kvfs.catalog import FORMAT
from kvfs.config import Config
from kvfs.control.channel import PROTOCOL, Channel, Closed, Message
from kvfs.daemon import verbs
from kvfs.daemon.mount import Mount
from kvfs.errors import CatalogError, ConfigError
from kvfs.live import LiveConfig
from kvfs.pool.errors import IndexDownError
from kvfs.s3.errors import OutageError

log = logging.getLogger("kvfs.daemon")

PRIORITY = -10  # its own effect on the p99 of docs/benchmarks.md was not measured separately
LOG_BYTES, LOG_FILES = 10 << 20, 3


def _serve(keeper: Channel, order: Message, config: Config) -> None:
    """Serve for the whole life of a daemon. Raises KvfsError, or the error that ends the daemon."""
    live = LiveConfig(config, runtime.runtime_dir(config.mountpoint) / "config")
    _prepare(live)
    mount = Mount(live, order, keeper)
    ended = False
    try:
        keeper.send("prepared")
        _, device = keeper.receive()
        mount.attach(device)
        trio.run(mount.serve, verbs.handlers, verbs.contents)
        ended = True
    finally:
        mount.close(ended=ended)
    log.info("%s: ended", config.mountpoint)


def _prepare(live: LiveConfig) -> None:
    """Set the limits, the log and the priority of this process. Raises ConfigError."""
    _start_log(live)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a lease on a file that another process wants
    if os.geteuid() == 0:
        # Every open of every engine waits for this loop. It needs little of a CPU, but immediately.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        Path("/proc/self/oom_score_adj").write_text("0")  # the keeper's value is not for daemons


def _start_log(live: LiveConfig) -> None:
    config = live.config
    path = config.log or runtime.log_path(config.mountpoint)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1
        )
    except OSError as error:
        raise ConfigError(f"log={path} cannot be written: {error}") from error
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[handler],
        force=True,
    )
    live.observe("log_level", lambda level: logging.getLogger().setLevel(level.upper()))
    logging.captureWarnings(capture=True)
    logging.getLogger("pyfuse3").addFilter(_late_release)


def _late_release(record: logging.LogRecord) -> bool:
    """Log a late answer to a close with log_level=debug only: no process waits for it.

    The closes of an unmount, also of a lazy one, come when the kernel has ended the mount.
    """
    ended = (os.strerror(errno.ENOENT),)
    if record.args != ended or not str(record.msg).startswith("fuse_release"):
        return True
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _unreadable(error: BaseException) -> CatalogError | None:
    """Return a damaged catalog from within nested groups of errors; None for any other error."""
    inner: list[BaseException]  # of a group; Python 3.10 has no class for it
    while len(inner := [*getattr(error, "exceptions", ())]) == 1:
        error = inner[0]
    return error if isinstance(error, CatalogError) else None


def main() -> int:
    """Run a daemon; its argument is one end of the keeper's channel."""
    faulthandler.enable()
    # The mount ends through the keeper; all processes of a service get this signal too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: log.info("%s ignored", signal.strsignal(got)))
    keeper = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        keeper.send("loaded", version=__version__, protocol=PROTOCOL, format=FORMAT)
        order, _ = keeper.receive()
        try:
            config = Config.from_json(json.dumps(order["config"]))
        except ConfigError as error:
            keeper.send("error", error=str(error), exit=2, config=True)
            return 1
        _serve(keeper, order, config)
        keeper.send("ended")
    except Closed:
        return 0  # the keeper does not need this process any more
    except Exception as error:
        # An option says where the index is, and another one mounts without it.
        refused = isinstance(error, ConfigError | IndexDownError)
        if unreadable := _unreadable(error):
            log.error("ended by an error: %s", unreadable)
            error = unreadable
        elif isinstance(error, OutageError | IndexDownError):
            log.error("ended by an error: %s", error)
        elif not refused:
            log.exception("ended by an error")
        with suppress(Closed):
            keeper.send("error", error=str(error) or repr(error), exit=2 if refused else 1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
