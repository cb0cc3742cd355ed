"""Where there is no passthrough: the daemon serves every byte.

Contract: the same interface as `passthrough.Passthrough`, on stock pyfuse3 without the C part.
"""

SLOTS = 1 << 20


class Served:
    """`why` says what is missing for passthrough."""

    on = False

    def __init__(self, why: str) -> None:
        self.why = why

    def register(self, fd: int) -> int:
        del fd
        return 0

    def release(self, backing_id: int) -> None:
        raise AssertionError(f"no backing id was given out, got {backing_id}")

    def bind(self, handle: int, backing_id: int, *, noflush: bool) -> None:
        """Nothing to say to the kernel."""
