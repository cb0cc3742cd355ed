"""Operations that a failing catalog refused: kvfs retries them until the catalog takes them.

Contract: any thread may `add`; only one task calls `run`. Each operation has its turn in every
round, and stays until it succeeds.
"""

from collections import deque
from collections.abc import Awaitable, Callable

from kvfs.errors import KvfsError

Retry = Callable[[], Awaitable[None]]


class Retries:
    """`waiting` are the operations, oldest first."""

    def __init__(self) -> None:
        self.waiting: deque[Retry] = deque()

    def add(self, again: Retry) -> None:
        self.waiting.append(again)

    async def run(self) -> None:
        """Try each operation once more; an operation that the catalog refuses again stays.

        After all had their turn, raises the error of the last one that was refused.
        """
        refused: KvfsError | None = None
        for _ in range(
            len(self.waiting)
        ):  # an operation that a thread adds meanwhile is for the next round
            again = self.waiting.popleft()
            try:
                await again()
            except KvfsError as error:
                self.waiting.append(again)
                refused = error
        if refused is not None:
            raise refused
