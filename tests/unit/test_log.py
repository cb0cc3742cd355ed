"""The lines of the daemon's log, and their levels."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.config import Config
from kvfs.daemon import __main__ as process
from kvfs.live import LiveConfig


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveConfig]:
    config = Config.from_options(tmp_path, f"ram=64M,log={tmp_path}/log")
    live = LiveConfig(config, tmp_path / "config")
    root, theirs = logging.getLogger(), logging.getLogger("pyfuse3")
    before, level, filters = root.handlers[:], root.level, theirs.filters[:]
    root.handlers = []
    process._start_log(live)  # the rest of _prepare() is for a process of its own
    yield live
    for handler in root.handlers:
        handler.close()
    root.handlers, theirs.filters = before, filters
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.mark.parametrize("verb", ["release", "releasedir"])
@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_close_that_an_unmount_ended_is_no_error(
    live: LiveConfig, tmp_path: Path, verb: str, level: str
) -> None:
    trio.run(live.change, {"log_level": level})
    theirs = logging.getLogger("pyfuse3")
    theirs.error(f"fuse_{verb}(): fuse_reply_* failed with %s", os.strerror(errno.ENOENT))
    theirs.error(f"fuse_{verb}(): fuse_reply_* failed with %s", os.strerror(errno.EIO))
    theirs.error("fuse_lookup(): fuse_reply_* failed with %s", os.strerror(errno.ENOENT))
    levels = [line.split()[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert levels == [*(["DEBUG"] if level == "debug" else []), "ERROR", "ERROR"]


def test_its_level_follows_the_option(live: LiveConfig) -> None:
    assert logging.getLogger().level == logging.INFO
    trio.run(live.change, {"log_level": "debug"})
    assert logging.getLogger().level == logging.DEBUG
