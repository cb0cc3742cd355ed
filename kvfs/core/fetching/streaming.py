"""Streaming: programs read an object while a mover fetches it, from a bucket or from a node.

Contract: `bring` runs one such fetch. It calls `began` when programs can read the object, before
all chunks are here. If the chunks have no digests, it never calls `began`, and programs wait for
the end of the fetch. If a mover dies, or the fetch begins anew with another source, the stream
begins anew in another file. No byte of the object passes through the daemon. Not for room, turns
and the meaning of a failure (`core/bucket/download`, `core/pool/fetch`).
"""

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.stream import Stream
from kvfs.errors import TierError
from kvfs.movement.movers import Moved
from kvfs.movement.streams import Ends, Word, WordKind, hear, path_of, tell
from kvfs.s3.chunks import chunk_size
from kvfs.tiers import Bucket, OtherNodes, Tier, TierCall

log = logging.getLogger(__name__)


async def bring(
    fill: Callable[[Ends], Awaitable[Moved]],
    inode: Inode,
    named: object,
    tier: Tier,
    began: Callable[[Stream], None],
    where: Bucket | OtherNodes,
) -> Moved:
    """Fetch an object into a tier.

    fill: has movers fetch it, one after the other. inode: the object's record at the begin of the
    fetch. named: the name of the object, for logs.
    """
    stream = Stream(tier, inode.size, chunk_size(inode.size), where)
    followed = False  # whether the stream has the file that the present mover fills
    # The mover opens its ends of both pipes by path. So the daemon keeps all four ends open.
    with ExitStack() as stack:
        from_mover, mover_output = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, from_mover)
        stack.callback(os.close, mover_output)
        mover_input, to_mover = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, mover_input)
        stack.callback(os.close, to_mover)
        own = f"/proc/{os.getpid()}/fd"
        ends = Ends(f"{own}/{mover_output}", f"{own}/{mover_input}")
        asked: set[int] = set()

        def want(chunk: int) -> None:
            if chunk not in asked:
                asked.add(chunk)
                with suppress(BlockingIOError):  # the pipe is full: enough requests are waiting
                    tell(to_mover, Word(WordKind.WANTED, chunk))

        async def handle(word: Word) -> None:
            nonlocal followed
            if word.kind is WordKind.BEGUN:
                followed = False
                opening = partial(os.open, path_of(word), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fd = await _io(tier, TierCall("open", opening, os.close))
                except (OSError, TierError) as error:  # the download has ended, successfully or not
                    log.debug("%s is not read while it comes: %s", named, error)
                    return
                asked.clear()
                if stream.fd < 0:
                    stream.want = want
                    began(stream)
                stream.begin(fd)
                followed = True
            elif word.kind is WordKind.HERE and followed:
                stream.arrived(word.number)

        async def listen() -> None:
            while True:
                await trio.lowlevel.wait_readable(from_mover)
                for word in hear(from_mover):
                    await handle(word)

        failures: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            try:
                moved = await fill(ends)
            except Exception as error:  # noqa: BLE001 (raised below, outside of the nursery)
                failures.append(error)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if stream.fd >= 0:  # the stream may have the incomplete file of a mover that died
            reopening = partial(tier.open, inode.ino, inode.version, writable=False)
            stream.begin(await _io(tier, TierCall("open", reopening, os.close)))
        return moved


async def _io(tier: Tier, job: TierCall[int]) -> int:
    return await tier.calls.call(job) if tier.slow else job()
