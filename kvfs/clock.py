"""The clock of code that has no trio loop.

Contract: whoever measures intervals there, or sleeps, is given a `Clock`, so that tests can pass
their own. What runs in the loop asks trio, whose clock tests replace as well.
"""

import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """`now` in seconds since any moment; `sleep` for so many."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()
