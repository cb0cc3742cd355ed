"""Operations that a failing catalog refused: they are tried again until it takes them.

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
        """Do what the catalog has refused; what it refuses again is there again.

        Raises what the last of those met, when all had their turn.
        """
        refused: KvfsError | None = None
        for _ in range(
            len(self.waiting)
        ):  # what is added meanwhile, by any thread, is for the next
            again = self.waiting.popleft()
            try:
                await again()
            except KvfsError as error:
                self.waiting.append(again)
                refused = error
        if refused is not None:
            raise refused
