"""Named places where a test makes kvfs fail: by an error, by delay, or by sudden death.

Contract: off unless KVFS_FAILPOINTS is set when this module is imported, or `arm` is called. Its
form is `NAME=ACTION@N;...`, for example `catalog.commit=kill@3;tiers.create=raise:ENOSPC@1`: at the
N-th passing (the first, without @N) the process kills itself (`kill`), waits (`delay:SECONDS`), or
fails with an OSError (`raise:ERRNO`). Each process counts for itself, movers too. A point that
nobody armed costs its caller

    if failpoints.active:
        failpoints.reach("catalog.commit")

3 ns (python -m timeit -s 'from kvfs import failpoints' 'if failpoints.active: pass': 7.5 ns, an
empty loop 4.5, medians of three on CPython 3.11). Jobs that take milliseconds call `reach` alone.
Not for faults at random, nor for anything that a user would want to set.
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

# Every point, and whether an error can come from there. Behind a change there can be none: the
# caller would take what has happened for undone.
POINTS = {
    "catalog.commit": True,
    "catalog.committed": False,
    "tiers.create": True,
    "tiers.created": False,
    "tiers.open": True,
    "tiers.rename": True,
    "tiers.renamed": False,
    "tiers.unlink": True,
    "tiers.unlinked": False,
    "tiers.quarantine": True,
    "tiers.quarantined": False,
    "objects.truncate": True,
    "objects.truncated": False,
    "objects.published": False,
    "walks.cleared": False,
    "walks.accounted": False,
    "walks.closed": False,
    "dispatcher.copied": False,
    "dispatcher.unpacked": False,
    "dispatcher.settled": False,
    "dispatcher.uploaded": False,
    "dispatcher.hydrated": False,
    "dispatcher.deleted": False,
    "movement.copy": True,
    "movement.copy.piece": True,
    "movement.copy.written": True,
    "movement.copy.renamed": False,
    "movement.pack": True,
    "movement.pack.written": True,
    "movement.pack.renamed": False,
    "movement.unpack": True,
    "movement.unpack.written": True,
    "movement.unpack.renamed": False,
    "movement.read": True,
    "movement.upload": True,
    "movement.uploaded": False,
    "movement.download": True,
    "movement.download.written": True,
    "movement.download.renamed": False,
    "fuse.backing.opened": False,
    "fuse.backing.closed": False,
    "fuse.handle.bound": False,
    "fuse.handle.releasing": False,
    "fuse.handle.released": False,
}


class _Fault(NamedTuple):
    action: str
    argument: float  # seconds or errno
    passing: int


active = False
passed: Counter[str] = Counter()  # how often each point was passed since something was armed
_faults: dict[str, list[_Fault]] = {}


def arm(text: str) -> None:
    """Forget what was armed and counted, and arm this; "" arms nothing. Raises ConfigError."""
    global active  # noqa: PLW0603 (a module variable is what costs the least to look at)
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
    """Called where a point is, and where each µs counts only while `active`. Raises OSError."""
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
