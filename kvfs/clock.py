"""The clock of code that has no trio loop.

Contract: code that measures intervals or sleeps outside a loop gets a `Clock`, so that tests can
pass their own. Code in the loop asks trio; tests replace trio's clock as well.
"""

import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """A clock: `now()` in seconds since a fixed moment; `sleep(seconds)`."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()
