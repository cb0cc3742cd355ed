"""Waiting for a future of a thread, in whichever loop runs: asyncio, or trio, which is not needed.

Contract: who is cancelled goes only when the call has ended, or has not begun and never will: until
then it fills memory of the caller's. Not for other loops.
"""

import asyncio
import sys
from concurrent.futures import Future
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def result(future: Future[T]) -> T:
    """Return what it returns; raise what it raises."""
    trio = _running_trio()
    if trio is not None:
        return cast("T", await trio.to_thread.run_sync(future.result))
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiter])
        raise


def _running_trio() -> Any:  # noqa: ANN401 (a module)
    """The module, if this is called in one of its tasks."""
    trio = sys.modules.get("trio")
    if trio is None:
        return None
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return None
    return trio
