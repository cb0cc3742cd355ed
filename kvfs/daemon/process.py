"""What the daemon's process needs of the system: a log, descriptors, a CPU at once."""

import errno
import logging
import logging.handlers
import os
import resource
import signal
from pathlib import Path

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.live import LiveConfig

PRIORITY = -10  # its own share in the p99 of docs/benchmarks.md was not measured apart
LOG_BYTES, LOG_FILES = 10 << 20, 3


def prepare(live: LiveConfig) -> None:
    """What this process needs of the system. Raises ConfigError."""
    _start_log(live)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a lease that somebody wanted back (Tier.shared)
    if os.geteuid() == 0:
        # Every open of every engine waits for this loop, which needs little of a CPU, but at once.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        Path("/proc/self/oom_score_adj").write_text("0")  # the keeper's is not for us


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
    """An unmount ends closes, which no process waits for; an answer that comes late is no error."""
    ended = (os.strerror(errno.ENOENT),)
    if record.args == ended and str(record.msg).startswith("fuse_release"):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True
