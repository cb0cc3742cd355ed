"""On PYTHONPATH of a daemon under test: a close of a file on NVMe takes a second.

The check for mappings is slow too, because it would repair the state that these tests look for.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvfs.core.objects import mappings
from kvfs.tiers.calls import Calls

TAKES = 1.0  # s
mappings.PERIOD = TAKES
_wait = Calls.run_unlimited


def _slowly(job: Callable[[], object]) -> object:
    time.sleep(TAKES)
    return job()


async def wait(self: Calls, job: Any) -> Any:  # noqa: ANN401 (whatever the job returns)
    closes = isinstance(job, partial) and job.func is os.close
    return await _wait(self, partial(_slowly, job) if closes else job)


Calls.run_unlimited = wait  # type: ignore[method-assign]
