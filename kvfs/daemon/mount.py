"""One mount: its parts, wired, and its life from the keeper's order to the unmount.

Contract: see the package. The parts of a `Mount` exist from `serve` on.
"""

import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress

import trio

from kvfs import own_files, preflight, runtime
from kvfs.config import Config
from kvfs.control import server
from kvfs.control.channel import Channel, Closed, Message
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.core.admin.ranking import Ranking
from kvfs.core.capacity.placement import Placement
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.dispatcher import Dispatcher
from kvfs.core.names.tree import Tree
from kvfs.core.names.walks import Walks
from kvfs.core.objects import takeover
from kvfs.core.objects.files import BackingFiles
from kvfs.core.objects.objects import Objects
from kvfs.daemon import bucket, pool
from kvfs.daemon.events import Events
from kvfs.daemon.exporter import Exporter
from kvfs.daemon.storage import MountStorage
from kvfs.errors import ConfigError
from kvfs.fairness.fair_queue import Shares
from kvfs.fuse.passthrough import SLOTS, SlotState  # the C part first, then pyfuse3
from kvfs.fuse.session import Session, backings_for, create_file, open_file
from kvfs.live import LiveConfig
from kvfs.movement.movers import MoverPool, scratch
from kvfs.movement.remote import Remote
from kvfs.templates import Templates
from kvfs.units import human

from kvfs.fuse import match_files, operations, virtual_files  # isort: skip
from kvfs.fuse.fast_open import FastGate  # isort: skip

log = logging.getLogger(__name__)

# `kvfs umount --now` ends within 5 s: with a second for its own start and the system's umount.
END_NOW = 3.0  # s, after which the keeper kills a daemon that is to end now
SYNC_NOW = 2.0  # s of them for syncing NVMe
SEAL = 0.5  # s for sealing files that were mapped until the end

HandlersOf = Callable[["Mount"], Mapping[str, server.VerbHandler]]
ContentsOf = Callable[["Mount"], virtual_files.Contents]


class Mount:
    """All parts of a mounted kvfs. `order` is the keeper's order to serve."""

    def __init__(self, live: LiveConfig, order: Message, keeper: Channel) -> None:
        """Make the parts. ConfigError: everything is unchanged, except a new tmpfs."""
        self.live = live
        config = live.config
        self.order = order
        self.keeper = keeper
        self.keeper_alive = True  # the keeper lives
        self.takeover: bool = order["takeover"]
        self.directory = runtime.make_private(runtime.runtime_dir(config.mountpoint))
        for name in ("control", "match"):  # emptied later, when it is too late to refuse
            own_files.ensure_folder(self.directory / name)
        self.started = time.monotonic()
        self.bucket = bucket.prepare(live, self.directory, takeover=self.takeover)
        node = bucket.identity(config) if self.bucket is None else self.bucket.identity
        self.member = pool.prepare(config, self.directory, identity=node, takeover=self.takeover)
        self.events = Events()
        self.discard_until = 0.0  # an unmount before this time writes nothing back
        self._fast_failed = ""
        self.fast_gate: FastGate | None = None  # set while opens are answered beside the loop
        self._saving: trio.CancelScope | None = None  # set while the objects of RAM are saved
        self.backings = backings_for(config)
        session_file = self.directory / "session"
        if self.takeover:
            self.session_file = open_file(session_file, config.mountpoint)
        else:
            self.session_file = create_file(session_file, config.mountpoint)
        self.storage = MountStorage(
            config, self.directory, self.bucket, takeover=self.takeover, fresh=node
        )
        self.ledger = self.storage.open(self.backings.invalidate_name)
        self.exporters: list[Exporter] = []
        try:
            self.templates = self._read_templates()
            self.exporters = Exporter.prepare(config, takeover=self.takeover)
        except ConfigError:
            self.close(ended=False)
            raise

    @property
    def config(self) -> Config:
        """Return the present configuration."""
        return self.live.config

    def _read_templates(self) -> Templates:
        """Return the templates. Raises ConfigError, but a takeover goes on without them."""
        path = self.config.namespaces
        try:
            return Templates() if path is None else Templates.read(path, self.ledger.tiers.media)
        except ConfigError as error:
            if not self.takeover:
                raise
            log.error(
                "new namespaces get no settings until this is mended and kvfs upgrade run: %s",
                error,
            )
            return Templates()

    # Life

    def attach(self, device: int) -> None:
        """Take the open /dev/fuse from the keeper: from now on memory must outlive this process."""
        self.storage.relied_on = True
        self.backings.attach(device, self.session_file, takeover=self.takeover)

    async def serve(self, handlers: HandlersOf, contents: ContentsOf) -> None:
        """Serve until unmounted or told to hand over.

        `handlers` answer on the control socket, `contents` are those of the control files.
        """
        config = self.config
        self.notes = bucket.notes(config, self.directory)
        self.identity = bucket.identity(config)
        async with AsyncExitStack() as stack:
            movers = await stack.enter_async_context(
                MoverPool.open(config.movers, self.ledger.counters)
            )
            urgent = await stack.enter_async_context(
                MoverPool.open(config.movers, self.ledger.counters, niceness=0)
            )
            remote = None
            if self.bucket is not None:
                remote = await stack.enter_async_context(
                    Remote.open(config.movers, self.ledger.counters, self.bucket)
                )
            self.room = Room(self.ledger)
            quota = Quota(self.ledger, self.room.victims)
            tree = Tree(self.ledger, templates=self.templates.for_name)
            self.dispatcher = Dispatcher(
                self.ledger,
                self.room,
                quota,
                movers,
                self.live,
                urgent=urgent,
                remote=remote,
                member=self.member,
                tree=tree,
                notes=self.notes,
                identity=self.identity,
                mountpoint=str(config.mountpoint),
            )
            objects = Objects(
                self.ledger,
                Placement(self.room, quota),
                BackingFiles(self.ledger.records, self.ledger.counters, self.backings),
                self.dispatcher.verification,
                promote=self.dispatcher.opened,
                verify=self.dispatcher.verification.written,
                fetcher=self.dispatcher.hydration,
                unpacker=self.dispatcher.unpacking,
                peers=None if self.dispatcher.pool is None else self.dispatcher.pool.fetcher,
            )
            self.lifecycle = Lifecycle(
                tree, invalidate_tree=self.backings.invalidate_tree, warmer=self.dispatcher.warm
            )
            if self.dispatcher.pool is not None:
                self.dispatcher.pool.switches.commands = self.lifecycle
            self.walks = Walks(tree, quota)
            self.ranking = Ranking(self.lifecycle)
            control = virtual_files.ControlFiles(
                contents(self), self.directory / "control", tree.catalog, takeover=self.takeover
            )
            self.matches = match_files.MatchFiles(
                self.directory / "match", tree, objects, self.backings, takeover=self.takeover
            )
            if self.dispatcher.pool is not None:
                self.matches.matching.elsewhere = self.dispatcher.pool.match
            self.operations = operations.Operations(
                tree,
                objects,
                self.lifecycle,
                self.backings,
                slots=SLOTS,
                bucket_listing=self.dispatcher.bucket_listing,
                pool=self.dispatcher.pool,
                virtual=virtual_files.VirtualFiles(control, self.matches),
            )
            self.live.observe("entry_timeout", self._change_timeout)
            self.live.observe_first("access_log", "access_log_size", trial=self._change_access_log)
            if self.takeover:
                await self._take_over(objects)
            self._say_notes()
            self.ledger.accounts.estimate()
            self.session = Session(config, self.operations)
            self._begin_events()
            if self.config.access_log is not None:
                # It was checked before. No process serves the mount yet, so this follows no path.
                try:
                    await self._note_accesses(self.config)
                except ConfigError as error:
                    log.error("nothing is noted for kvfs profile: %s", error)
            await self._serve_mounted(handlers(self))

    async def _change_access_log(self, config: Config) -> None:
        """Change the access log as the configuration says. ConfigError: nothing is changed."""
        path, roots = config.access_log, [tier.root for tier in self.ledger.tiers.local]
        if path is not None:
            check = preflight.check_access_log
            await trio.to_thread.run_sync(check, path, config.mountpoint, roots)
        await self._note_accesses(config)

    async def _note_accesses(self, config: Config) -> None:
        change, fast_opens = self.ledger.namespaces.access_log.change, self.ledger.fast_opens
        fast_opens.empty()
        fast_opens.see()  # these opens came before the change: the log has none of them
        while self.ledger.misses.settle(late=0):
            await trio.lowlevel.checkpoint()
        await trio.to_thread.run_sync(change, config.access_log, config.access_log_size)
        fast_opens.empty()

    def _change_timeout(self, timeout: float) -> None:
        self.operations.timeout = timeout
        self.ledger.fast_opens.empty()

    def _begin_events(self) -> None:
        self.dispatcher.scrub.on_event = self.events.add
        if self.dispatcher.pool is not None:
            self.dispatcher.pool.news.on_event = self.events.add
        healths = [tier.health for tier in self.ledger.tiers.local]
        self.events.watch(healths if self.bucket is None else [*healths, self.bucket.health])
        kind = "takeover" if self.takeover else "started"
        handles = len(self.operations.handles)
        # A first daemon has no reason, and a keeper of an earlier version gives none.
        cause = {"why": why} if (why := self.order.get("why")) else {}
        self.events.add(
            kind, number=self.order["takeovers"], pid=os.getpid(), handles=handles, **cause
        )

    def _say_notes(self) -> None:
        """Log the cost of namespaces' settings."""
        spaces, tiers = self.ledger.namespaces, self.ledger.tiers.local
        for space in spaces if not self.takeover else ():
            if note := space.note(tiers):
                log.info("namespace %s: %s", spaces.name(space.ino), note)

    async def _take_over(self, objects: Objects) -> None:
        slots = self.backings.slots()
        lefts = [
            takeover.Left(
                slot.handle,
                slot.inode,
                slot.backing_id,
                slot.writable,
                slot.tier,
                slot.state is SlotState.RELEASING,
                slot.direct,
            )
            for slot in slots
        ]
        living = (slot for slot in slots if slot.state is not SlotState.RELEASING)
        self.backings.adopt(slot.backing_id for slot in living)
        found = takeover.adopt(objects, lefts)
        for handle in self.operations.handles.adopt(slots, self.backings.slots_end(), found.get):
            await objects.sealing.release(handle.held, writable=handle.writable)
        log.info(
            "%s: took over %d handles of %d objects, %d of them being written",
            self.config.mountpoint,
            len(self.operations.handles),
            len(self.ledger.table.open),
            len(self.ledger.table.staging),
        )

    async def _serve_mounted(self, handlers: Mapping[str, server.VerbHandler]) -> None:
        async with trio.open_nursery() as nursery:
            shares = Shares(nursery)

            def limit(rate: int) -> None:
                shares.total.rate = rate
                self.ledger.namespaces.share(shares)

            self.live.observe("bandwidth", limit)
            await nursery.start(server.serve, self.directory / "control.sock", handlers)
            nursery.start_soon(self._hear_keeper)
            nursery.start_soon(self.dispatcher.run)
            walks = self.walks
            for task in (walks.run, walks.close_prefixes, walks.expire, self.ranking.run):
                nursery.start_soon(self.dispatcher.keep_up, task)
            nursery.start_soon(self.operations.objects.sealing.mappings.watch)
            nursery.start_soon(self.operations.objects.sealing.bounds.watch)
            nursery.start_soon(self.operations.waits.watch)
            nursery.start_soon(self._announce)
            nursery.start_soon(self.events.sum_up, self.ledger, self.operations.errors)
            for exporter in self.exporters:
                nursery.start_soon(exporter.run)
            nursery.start_soon(self._open_fast)
            await self.session.run()
            self._end_fast()
            self.ledger.uses.commit()
            if self.session.stopped:
                self._leave()
            log.info("%s: unmounted", self.config.mountpoint)
            with suppress(Closed, BlockingIOError):
                self.keeper.send("unmounted")
            self.dispatcher.end_ahead()
            if self.dispatcher.hydration is not None:
                self.dispatcher.hydration.stop()
            self.dispatcher.unpacking.stop()
            if self.dispatcher.pool is not None:
                await self.dispatcher.pool.end()
            with trio.move_on_after(SEAL if self.discards else math.inf):
                await self.operations.release_unsent()
                await self.operations.objects.sealing.mappings.end(lambda _: True)
            await self._save()
            self.ledger.accounts.leave_estimate(self.dispatcher.admission.spent)
            if self.discards:
                self._end_now()
            nursery.cancel_scope.cancel()
        await self.dispatcher.trash.empty()
        if cut := [one.inode for one in self.ledger.table.staging.values() if not one.inode.sealed]:
            log.warning(
                "%d files were still being written when the mount ended, and are lost; the first "
                "is %s",
                *(len(cut), self.ledger.catalog.named(cut[0].ino)),
            )

    async def _open_fast(self) -> None:
        """Answer opens beside the loop, once no request of a dead daemon can come again."""
        if self.takeover:
            await self.operations.end_takeover()
        while not self.backings.negotiated:  # noqa: ASYNC110 (the C part has no events)
            await trio.sleep(0.002)
        if self.fast_open_why:
            return
        fast, handles = self.ledger.fast_opens, self.operations.handles
        gate = FastGate(
            *(self.backings, handles, self.operations.attributes_of, self.ledger.tiers.ram.root)
        )
        handles.take_fast = fast.take_handle
        fast.opened = self.operations.opened_fast
        fast.reopen = self.operations.objects.reopen
        try:
            fast.start(gate)
        except OSError as error:
            gate.stop()
            self._fast_failed = f"its thread or its table cannot be had: {error.strerror}"
            log.warning("opens of files in RAM take the longer way: %s", self._fast_failed)
            return
        self.fast_gate = gate
        async with trio.open_nursery() as nursery:
            if not self.ledger.tiers.bucket.mounted and self.member is None:
                self.ledger.absent_names.start(gate, self.operations.virtual.names)
                nursery.start_soon(self.ledger.absent_names.run)
            await fast.run()

    @property
    def fast_open_why(self) -> str:
        """Return why opens of files in RAM take the longer way; "" if they do not."""
        if not self.config.fast_open:
            return "turned off by fast_open=off"
        if not self.backings.on:
            return f"passthrough is off: {self.backings.why}"
        return self._fast_failed if self.ledger.tiers.ram.mounted else "the mount has no RAM tier"

    def _end_fast(self) -> None:
        """Make all fast opens the loop's own. Nothing is read from the kernel from here on."""
        if self.fast_gate is None:
            return
        self.ledger.fast_opens.stop()
        self.ledger.absent_names.stop()
        for ino in self.fast_gate.stop():
            self.ledger.removals.forgotten(ino)
        self.fast_gate = None

    @property
    def discards(self) -> bool:
        """Return whether an unmount at this moment is to lose the objects that only RAM has."""
        return time.monotonic() < self.discard_until

    def discard(self, until: float) -> None:
        """Let an unmount before that time save nothing; one that is saving now stops."""
        self.discard_until = until
        if self.discards and self._saving is not None:
            self._saving.cancel()

    async def _save(self) -> None:
        """Write back and upload objects that would be lost, until `discard` stops it."""
        with trio.CancelScope() as self._saving:
            if not self.discards:
                await self.dispatcher.write_back.drain()
                if self.dispatcher.uploader is not None:
                    await self.dispatcher.uploader.drain()
        if not self.discards and self.ledger.accounts.only_ram_objects:
            self._say_lost("unmounted")

    def _say_lost(self, how: str) -> None:
        """Log the objects that only RAM has at the end of the mount."""
        accounts = self.ledger.accounts
        log.info(
            "%s: %s: %s%d objects (%s) are lost with RAM: neither NVMe nor the bucket had them%s",
            *(self.config.mountpoint, how),
            "" if accounts.census_done.is_set() else "at least ",
            accounts.only_ram_objects,
            human(accounts.only_ram_bytes),
            "; other nodes of the pool may have some of them" if self.dispatcher.pool else "",
        )

    def _end_now(self) -> None:
        """End without waiting for a mover or a disk: the keeper kills this process soon.

        Nothing else runs from here on, so no task sees its mover die. The next mount removes the
        unfinished files of movers.
        """
        with suppress(Closed, BlockingIOError):
            self.keeper.send("ending", seconds=END_NOW)
        for worker in multiprocessing.active_children():
            worker.kill()
        if jobs := self.dispatcher.jobs:
            log.info("%s: %d jobs of movers are given up", self.config.mountpoint, jobs)
        self._say_lost("unmounted with --now")
        self.close(ended=True, patience=SYNC_NOW)
        log.info("%s: ended", self.config.mountpoint)
        with suppress(Closed, BlockingIOError):
            self.keeper.send("ended")
        logging.shutdown()
        os._exit(0)

    async def _announce(self) -> None:
        """Tell the keeper that the mount is ready, once the kernel and libfuse have negotiated."""
        while not self.backings.negotiated:  # noqa: ASYNC110 (the C part has no events)
            await trio.sleep(0.002)
        config = self.config
        if config.passthrough == "on" and not self.backings.on:
            why = f"passthrough=on, but {self.backings.why}; mount with auto"
            self.keeper.send("error", error=why, exit=2)  # the keeper unmounts, and ends us
            return
        as_wanted = self.backings.on or config.passthrough == "off"
        log.log(
            logging.INFO if as_wanted or self.takeover else logging.WARNING,
            "%s: mounted, passthrough %s: %s",
            config.mountpoint,
            "on" if self.backings.on else "off",
            self.backings.why,
        )
        # The movers for a bucket have a socket there, and a daemon that is killed leaves it behind.
        left = scratch() if config.s3 else ""
        self.keeper.send("ready", watchdog=config.watchdog, scratch=left)
        while True:
            await trio.sleep(config.watchdog / 4 or 60.0)
            with suppress(BlockingIOError, Closed):
                self.keeper.send("alive")

    async def _hear_keeper(self) -> None:
        """Hand over when told to. Without a keeper the mount goes on as long as this process."""
        self.keeper.socket.setblocking(False)  # noqa: FBT003 (socket's own)
        try:
            while True:
                await trio.lowlevel.wait_readable(self.keeper)
                message, _ = self.keeper.receive()
                if message["what"] == "hand_over":
                    log.info("%s: handing over to another daemon", self.config.mountpoint)
                    self.session.stop()
        except Closed:
            self.keeper_alive = False
            log.error(
                "the keeper of %s is dead: this daemon goes on, but the mount ends with it",
                self.config.mountpoint,
            )

    def _leave(self) -> None:
        """Make way, after an answer to every request that was read. Movers' jobs are done again."""
        self.close(ended=False)
        with suppress(Closed):
            self.keeper.send("handed_over")
        logging.shutdown()
        os._exit(0)

    def close(self, *, ended: bool, patience: float | None = None) -> None:
        """Release everything. `ended`: the file system was unmounted.

        patience: see `MountStorage.close`.
        """
        self.events.close()
        self.ledger.namespaces.access_log.change(None, 0)
        for exporter in self.exporters:
            exporter.close(ended=ended)
        self.storage.close(ended=ended, patience=patience)
