"""Named places where a test makes kvfs fail: by an error, by delay, or by sudden death.

Contract: off unless KVFS_FAILPOINTS is set when this module is imported, or `arm` is called. Its
form is `NAME=ACTION@N;...`, for example `catalog.commit=kill@3;tiers.create=raise:ENOSPC@1`: at the
N-th passing (the first, without @N) the process kills itself (`kill`), waits (`delay:SECONDS`), or
fails with an OSError (`raise:ERRNO`). Each process counts for itself, movers too. A point that is
not armed costs its caller

    if failpoints.active:
        failpoints.reach("catalog.commit")

3 ns (python -m timeit -s 'from kvfs import failpoints' 'if failpoints.active: pass': 7.5 ns, an
empty loop 4.5, medians of three on CPython 3.11). Jobs that take milliseconds call `reach` alone.
"""

import errno
import os
import re
import signal
import time
from collections import Counter
from typing import NamedTuple

from kvfs.errors import ConfigError

VARIABLE = "KVFS_FAILPOINTS"

# Every point from which an error can come.
_BEFORE = (
    *("catalog.commit", "tiers.create", "tiers.open", "tiers.rename", "tiers.unlink"),
    *("tiers.quarantine", "objects.truncate"),
    *("movement.copy", "movement.copy.piece", "movement.copy.written"),
    *("movement.pack", "movement.pack.written", "movement.unpack", "movement.unpack.written"),
    *("movement.read", "movement.upload", "movement.download", "movement.download.written"),
)
# Every point behind a change. After an error there the caller would take the change for undone.
_BEHIND = (
    *("catalog.committed", "tiers.created", "tiers.renamed", "tiers.unlinked"),
    *("tiers.quarantined", "objects.truncated", "objects.published"),
    *("walks.cleared", "walks.accounted", "walks.closed"),
    *("dispatcher.copied", "dispatcher.unpacked", "dispatcher.settled", "dispatcher.uploaded"),
    *("dispatcher.hydrated", "dispatcher.deleted"),
    *("movement.copy.renamed", "movement.pack.renamed", "movement.unpack.renamed"),
    *("movement.uploaded", "movement.download.renamed"),
    *("fuse.backing.opened", "fuse.backing.closed"),
    *("fuse.handle.bound", "fuse.handle.releasing", "fuse.handle.released"),
)
POINTS = dict.fromkeys(_BEFORE, True) | dict.fromkeys(_BEHIND, False)  # whether an error can come


class _Fault(NamedTuple):
    action: str
    argument: float  # seconds or errno
    passing: int


active = False
passed: Counter[str] = Counter()  # how often each point was passed since something was armed
_faults: dict[str, list[_Fault]] = {}


def arm(text: str) -> None:
    """Forget all armed points and counts, and arm these; "" arms none. Raises ConfigError."""
    global active  # noqa: PLW0603 (a module variable is the cheapest to test)
    faults: dict[str, list[_Fault]] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, fault = _parsed(entry)
        faults.setdefault(name, []).append(fault)
    passed.clear()
    _faults.clear()
    _faults.update(faults)
    active = bool(faults)


def _parsed(entry: str) -> tuple[str, _Fault]:
    name, _, rest = entry.partition("=")
    what, _, passing = rest.partition("@")
    action, _, argument = what.partition(":")
    if name not in POINTS:
        raise ConfigError(
            f"{VARIABLE}: {entry!r} names no fail point, expected one of {', '.join(POINTS)}"
        )
    if passing and not re.fullmatch(r"[1-9][0-9]{0,8}", passing):
        raise ConfigError(f"{VARIABLE}: {entry!r} has passing {passing!r}, expected 1, 2, 3, ...")
    number = int(passing or 1)
    if action == "kill" and not argument:
        return name, _Fault(action, 0, number)
    if action == "delay" and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", argument):
        return name, _Fault(action, float(argument), number)
    if action == "raise" and argument in errno.errorcode.values():
        if not POINTS[name]:
            raise ConfigError(f"{VARIABLE}: {entry!r}: {name} is behind a change, nothing fails")
        return name, _Fault(action, getattr(errno, argument), number)
    raise ConfigError(
        f"{VARIABLE}: {entry!r} has no such action, expected kill, delay:SECONDS or raise:ERRNO"
    )


def reach(name: str) -> None:
    """Pass a point. Where each µs counts, call this only while `active`. Raises OSError."""
    if name not in POINTS:
        raise KeyError(f"fail point {name} is not in POINTS")
    passed[name] += 1
    for action, argument, passing in _faults.get(name, ()):
        if passing != passed[name]:
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "delay":
            time.sleep(argument)
        else:
            number = int(argument)
            raise OSError(number, f"{os.strerror(number)} (fail point {name})")


arm(os.environ.get(VARIABLE, ""))
