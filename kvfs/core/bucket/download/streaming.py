"""Streaming: programs read an object while a mover downloads it.

Contract: `bring` runs one such job. It calls `began` when the object can be read, before the rest
has come. If the chunks have no digests, it never calls `began`, and the object comes as a whole. If
a mover dies, the download and the stream begin anew in another file. The daemon passes on no bytes.
Not for room, turns and the meaning of a failure (`hydration`).
"""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.stream import Stream
from kvfs.errors import TierError
from kvfs.movement.downloading import Ends, Say, Wanted, Word, hear, path_of, tell
from kvfs.movement.movers import Moved
from kvfs.movement.remote import Remote
from kvfs.s3.chunks import chunk_size
from kvfs.tiers import Tier, TierCall

log = logging.getLogger(__name__)


async def bring(
    remote: Remote,
    inode: Inode,
    named: object,
    wanted: Wanted,
    tier: Tier,
    began: Callable[[Stream], None],
) -> Moved:
    """Download the object `named` into a tier; `inode` is its record when the fetch began."""
    stream = Stream(tier, inode.size, chunk_size(inode.size))
    followed = False  # whether the stream has the file that the mover fills now
    with (
        ExitStack() as stack
    ):  # the mover opens its ends of both pipes by path, so both ends stay open here
        heard, tell_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, heard)
        stack.callback(os.close, tell_end)
        hear_end, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, hear_end)
        stack.callback(os.close, said)
        own = f"/proc/{os.getpid()}/fd"
        ends = Ends(f"{own}/{tell_end}", f"{own}/{hear_end}")
        asked: set[int] = set()

        def want(chunk: int) -> None:
            if chunk not in asked:
                asked.add(chunk)
                with suppress(BlockingIOError):  # the pipe is full: enough requests are waiting
                    tell(said, Word(Say.WANTED, chunk))

        async def obey(word: Word) -> None:
            nonlocal followed
            if word.say is Say.BEGUN:
                followed = False
                opening = partial(os.open, path_of(word), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fd = await _io(tier, TierCall("open", opening, os.close))
                except (OSError, TierError) as error:  # the download has ended, with any result
                    log.debug("%s is not read while it comes: %s", named, error)
                    return
                asked.clear()
                if stream.fd < 0:
                    stream.want = want
                    began(stream)
                stream.begin(fd)
                followed = True
            elif word.say is Say.HERE and followed:
                stream.arrived(word.number)

        async def listen() -> None:
            while True:
                await trio.lowlevel.wait_readable(heard)
                for word in hear(heard):
                    await obey(word)

        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            try:
                moved = await remote.stream(wanted, ends)
            except Exception as error:  # noqa: BLE001 (raised below, outside of the nursery)
                failures.append(error)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if stream.fd >= 0:  # the file of the stream may be another mover's, and incomplete
            path_now = partial(tier.open, inode.ino, inode.version, writable=False)
            stream.begin(await _io(tier, TierCall("open", path_now, os.close)))
        return moved


async def _io(tier: Tier, job: TierCall[int]) -> int:
    return await tier.calls.call(job) if tier.slow else job()
