"""Fast opens where the gate cannot have its thread: the daemon answers all opens, as without it."""

from pathlib import Path

import pytest
import trio

from tests.unit.fast_gate import TableGate
from tests.unit.world import World, world


class NoThread(TableGate):
    """A gate without memory for its table."""

    def turn(self, *, on: bool) -> None:
        if on:
            raise OSError(12, "Cannot allocate memory")


def test_without_a_thread_the_daemon_answers(tmp_path: Path) -> None:
    async def close_and_open(made: World) -> None:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            made.ledger.fast_opens.start(NoThread(made))
        assert made.ledger.fast_opens.gate is None
        held = await made.create(b"a", b"content")
        await made.close(held, writable=True)
        assert not made.ledger.fast_opens.waiting
        assert await made.read(held.inode.ino) == b"content"
        made.check()
        await made.check_at_rest()

    with world(tmp_path, passthrough=True) as made:
        trio.run(close_and_open, made)
