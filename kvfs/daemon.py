"""The daemon: wires everything, and is the only place that knows everything.

Contract: one trio loop, in which nothing waits for a disk, a network or a hash. It is started by
the keeper, tells it how far it has come (control/channel.py), and serves the /dev/fuse that it is
given. Order of birth: code, tiers and locks, catalog, what the predecessor or the last mount left,
the kernel's requests, background work. It may die at any instruction: the next one goes on from
the catalog, the tiers and the session file. Only when the file system was unmounted, by whomever,
does it write back what only RAM held, and end the session properly.
"""

import faulthandler
import json
import logging
import logging.handlers
import os
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from kvfs import __version__, failpoints, mounts, runtime
from kvfs.catalog import FORMAT, Catalog
from kvfs.config import Config
from kvfs.control import server
from kvfs.control.channel import PROTOCOL, Channel, Closed, Message
from kvfs.core import administration, recovery, takeover
from kvfs.core.flow import Flow
from kvfs.core.lifecycle import Lifecycle, check_media
from kvfs.core.objects import Objects
from kvfs.core.residency import Residency
from kvfs.core.room import Room
from kvfs.core.sessions import mounted_as, past_sessions
from kvfs.core.tree import Tree
from kvfs.core.walks import Walks
from kvfs.errors import ConfigError, KvfsError
from kvfs.fairness.shares import Shares
from kvfs.fuse.passthrough import SLOTS, State  # the C part first, then pyfuse3
from kvfs.fuse.session import Session, backings_for, create_file, open_file
from kvfs.movement.movers import Movers
from kvfs.templates import Templates
from kvfs.tiers import NvmeTier, RamTier

from kvfs.fuse import operations  # isort: skip  # it imports pyfuse3

log = logging.getLogger(__name__)

DISCARD_PATIENCE = 60.0  # s between an order not to write back and the unmount
PRIORITY = -10  # its own share in the p99 of docs/benchmarks.md was not measured apart
LOG_BYTES, LOG_FILES = 10 << 20, 3
LOCKS_PATIENCE = 1.0  # s that a takeover waits for the locks of the dead


class Mount:
    """All that a mounted kvfs consists of. `order` is the keeper's word to serve."""

    takeover = False

    def __init__(self, config: Config, order: Message, keeper: Channel) -> None:
        """Raises ConfigError and leaves everything as it was, but for a tmpfs that it made."""
        self.config = config
        self.order = order
        self.keeper = keeper
        self.kept = True  # the keeper lives
        self.serving = False  # from then on others rely on what is in memory
        self.takeover = order["takeover"]
        self.directory = runtime.make_private(runtime.runtime_dir(config.mountpoint))
        self.started = time.monotonic()
        self.discard_until = 0.0  # an unmount before this time writes nothing back
        self.nvme: NvmeTier | None = None
        self.ram: RamTier | None = None
        self.catalog: Catalog | None = None
        self.session_number = 0
        self.backings = backings_for(config)
        session_file = self.directory / "session"
        if self.takeover:
            self.session_file = open_file(session_file, config.mountpoint)
        else:
            self.session_file = create_file(session_file, config.mountpoint)
        deadline = self.started + (LOCKS_PATIENCE if self.takeover else 0)
        while True:
            try:
                self._open_tiers()
                break
            except ConfigError:  # the predecessor's locks, while the kernel still buries it
                self.close(ended=False)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        try:
            self.templates = self._read_templates()
        except ConfigError:
            self.close(ended=False)
            raise

    # Birth

    def _read_templates(self) -> Templates:
        """Raises ConfigError, but not at a takeover: the mount goes on without them."""
        path = self.config.namespaces
        if path is None:
            return Templates()
        try:
            templates = Templates.read(path)
            for pattern, settings in templates.by_pattern:
                try:
                    check_media(settings, self.residency.tiers)
                except ConfigError as error:
                    raise ConfigError(f'{path}: [namespace."{pattern}"]: {error}') from None
        except ConfigError as error:
            if not self.takeover:
                raise
            log.error("new namespaces get no settings until the mount is made anew: %s", error)
            return Templates()
        return templates

    def _open_tiers(self) -> None:
        config = self.config
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"kvfs:{config.mountpoint}"))
        if config.nvme is not None:
            self.nvme = NvmeTier(config.nvme, config.nvme_size, expected=self._identity_before())
            self.nvme.grows = "nvme_size" in config.fitted
            self.nvme.say_who(f"process {os.getpid()}, mounted on {config.mountpoint}")
            identity = self.nvme.identity
            (self.directory / "nvme").write_text(identity)
            self.catalog = Catalog(config.nvme / "catalog")
        epoch = None if self.catalog is None else int(self.catalog.fact("ram_epoch") or 0)
        root = runtime.ram_root() / identity
        if config.ram:
            self.ram = RamTier(root, config.ram, identity=identity, epoch=epoch, huge=config.huge)
        elif runtime.mount_at(root) is not None:
            log.warning("ram=0: what only the RAM tier of the last session held is gone")
            mounts.umount(root, mounts.MNT_DETACH)
            root.rmdir()
        if self.catalog is None:
            assert self.ram is not None  # the configuration has one tier at least
            # It goes with the memory; the numbers that NFS clients have seen must not come back.
            self.catalog = Catalog(self.ram.root / "catalog", first_id=int(time.time()) << 20)
        self.residency = self._begin_session(self.catalog, self.backings.gone)

    def _identity_before(self) -> str | None:
        """What the predecessor served: the directory may have become another one since."""
        path = self.directory / "nvme"
        return path.read_text() if self.takeover and path.exists() else None

    def _begin_session(
        self, catalog: Catalog, gone: Callable[[int, bytes, int], None]
    ) -> Residency:
        """Number this session, and say which earlier ones a power loss makes suspect.

        Those are the sessions after the last one that ended properly, if the machine went down
        since, or the disk was mounted anew: their bytes may not have reached it, whatever the file
        system says.
        """
        last, ended, same_mount, low, high = past_sessions(catalog)
        goes_on = self.takeover and same_mount
        self.session_number = last if goes_on else last + 1
        if ended < last and not goes_on:
            log.warning(
                "the last session did not end properly: %s",
                "its bytes are all there" if same_mount else "copies are verified before use",
            )
        residency = Residency(
            catalog,
            self.ram,
            self.nvme,
            session=self.session_number,
            suspect=range(low, high + 1),
            gone=gone,
        )
        with catalog.batch() as batch:
            batch.set_fact("session", str(self.session_number))
            batch.set_fact("suspect", f"{low} {high}")
            batch.set_fact("boot", mounted_as(catalog))
            if self.ram is not None:
                batch.set_fact("ram_epoch", str(self.ram.epoch))
            batch.sync = True
            if self.takeover:
                catalog.answers.load(catalog.answer_entries())
            else:
                batch.forget_answers()
        Tree(residency).make_root(uid=os.geteuid(), gid=os.getegid())
        residency.first_new = catalog.next_id()  # what is older, the census has yet to count
        if not self.takeover:
            recovery.drop_unfinished(residency)
        return residency

    # Life

    async def serve(self) -> None:
        """Until unmounted or told to hand over. The device is attached."""
        config = self.config
        async with Movers.open(config.movers, self.residency.counters) as movers:
            self.movers = movers
            self.room = Room(self.residency)
            self.flow = Flow(
                self.residency,
                self.room,
                movers,
                promote_after=config.promote_after,
                reclaimable=config.reclaimable,
                nvme_writes=config.nvme_writes,
            )
            self.flow.admission.budget = config.nvme_writes
            objects = Objects(
                self.residency,
                self.room,
                self.backings,
                self.flow.settlement,
                promote=self.flow.promotion.opened,
                settle=self.flow.settlement.written,
            )
            tree = Tree(self.residency, templates=self.templates.for_name)
            self.lifecycle = Lifecycle(tree, gone=self.backings.detached)
            self.walks = Walks(tree)
            self.operations = operations.Operations(
                tree,
                objects,
                self.lifecycle,
                self.backings,
                slots=SLOTS,
                timeout=config.entry_timeout,
            )
            if self.takeover:
                await self._take_over(objects)
            self.residency.estimate()
            self.session = Session(config, self.operations)
            await self._serve_mounted()

    async def _take_over(self, objects: Objects) -> None:
        slots = self.backings.slots()
        lefts = [
            takeover.Left(
                slot.handle,
                slot.inode,
                slot.backing_id,
                slot.writable,
                slot.tier,
                slot.state is State.RELEASING,
            )
            for slot in slots
        ]
        self.backings.adopt(slot.backing_id for slot in slots)
        found = takeover.adopt(objects, lefts)
        for handle in self.operations.handles.adopt(slots, self.backings.slots_end(), found.get):
            await objects.release(handle.held, writable=handle.writable)
        log.info(
            "%s: took over %d handles of %d objects, %d of them being written",
            self.config.mountpoint,
            len(self.operations.handles),
            len(self.residency.open),
            len(self.residency.staging),
        )

    async def _serve_mounted(self) -> None:
        async with trio.open_nursery() as nursery:
            self.shares = Shares(nursery, self.config.bandwidth)
            self.residency.namespaces.share(self.shares)
            await nursery.start(
                server.serve,
                self.directory / "control.sock",
                {
                    **administration.handlers(self.lifecycle),
                    "status": self._status,
                    "set": self._set,
                    "write_back": self._write_back,
                    "discard_ram": self._discard_ram,
                    "check": self.flow.checks.start,
                    "checked": self.flow.checks.look,
                    "arm": self._arm,
                },
            )
            nursery.start_soon(self._hear_keeper)
            nursery.start_soon(self.flow.run)
            nursery.start_soon(self.flow.keep_up, self.walks.run)
            nursery.start_soon(self.flow.keep_up, self.walks.expire)
            nursery.start_soon(self.operations.objects.mappings.watch)
            nursery.start_soon(self._announce)
            if self.takeover:
                nursery.start_soon(self.operations.end_takeover)
            await self.session.run()
            if self.session.stopped:
                self._leave()
            log.info("%s: unmounted", self.config.mountpoint)
            await self.operations.objects.mappings.end(lambda _: True)
            if time.monotonic() >= self.discard_until:
                await self.flow.write_back.drain()
            nursery.cancel_scope.cancel()
        await self.flow.trash.empty()
        if self.residency.open:
            log.warning("%d inodes were still open", len(self.residency.open))

    async def _announce(self) -> None:
        """The mount is ready when the kernel and libfuse have agreed on how."""
        while not self.backings.settled:  # noqa: ASYNC110 (the C part has no events)
            await trio.sleep(0.002)
        config = self.config
        if config.passthrough == "on" and not self.backings.on:
            why = f"passthrough=on, but {self.backings.why}; mount with auto"
            self.keeper.send("error", error=why, exit=2)  # it unmounts, and ends us
            return
        as_wanted = self.backings.on or config.passthrough == "off"
        log.log(
            logging.INFO if as_wanted or self.takeover else logging.WARNING,
            "%s: mounted, passthrough %s: %s",
            config.mountpoint,
            "on" if self.backings.on else "off",
            self.backings.why,
        )
        self.keeper.send("ready", watchdog=config.watchdog)
        while True:
            await trio.sleep(config.watchdog / 4 or 60.0)
            with suppress(BlockingIOError, Closed):
                self.keeper.send("alive")

    async def _hear_keeper(self) -> None:
        """Hand over when told to. Without a keeper the mount goes on, as long as we do."""
        self.keeper.socket.setblocking(False)  # noqa: FBT003 (socket's own)
        try:
            while True:
                await trio.lowlevel.wait_readable(self.keeper)
                message, _ = self.keeper.receive()
                if message["what"] == "hand_over":
                    log.info("%s: handing over to another daemon", self.config.mountpoint)
                    self.session.stop()
        except Closed:
            self.kept = False
            log.error(
                "the keeper of %s is dead: this daemon goes on, but the mount ends with it",
                self.config.mountpoint,
            )

    def _leave(self) -> None:
        """Every request that was read is answered: make way. Jobs of movers are done again."""
        self.close(ended=False)
        with suppress(Closed):
            self.keeper.send("handed_over")
        logging.shutdown()
        os._exit(0)

    # Control

    async def _status(self) -> dict[str, Any]:
        residency, config = self.residency, self.config
        ram = self.ram
        return {
            "version": __version__,
            "mountpoint": str(config.mountpoint),
            "daemon_pid": os.getpid(),
            "keeper_pid": self.order["keeper_pid"] if self.kept else 0,
            "takeovers": self.order["takeovers"],
            "uptime_s": round(time.monotonic() - self.started, 3),
            "passthrough": {"on": self.backings.on, "why": self.backings.why},
            "huge_pages": {
                "on": ram is not None and ram.huge,
                "why": "no RAM tier" if ram is None else ram.huge_why,
            },
            "tiers": {
                tier.name: {
                    "path": str(tier.root),
                    "capacity_bytes": tier.capacity,
                    "used_bytes": tier.used,
                    "reserved_bytes": tier.reserved,
                    "objects": tier.objects,
                    "hits": tier.hits,
                    "state": tier.health.state,
                    "state_s": round(time.monotonic() - tier.health.since, 3),
                    "why": "; ".join(filter(None, (tier.health.why, tier.shortage))),
                }
                for tier in residency.tiers
            },
            "objects": residency.objects,
            "census_done": residency.census_done.is_set(),
            "open_handles": len(self.operations.handles),
            "writers": len(residency.staging),
            "jobs": self.flow.jobs,
            "writing_back": self.flow.write_back.wanted,
            "trash": len(self.flow.trash),
            "reclaimable_bytes": self.room.reclaimable,
            "counters": dict(residency.counters),
            "nvme_writes": dict(self.flow.admission.counters),
            **administration.summary(self.lifecycle),
            "options": config.as_options(),
        }

    async def _set(self, **options: str) -> dict[str, Any]:
        """Change hot options. Raises ConfigError and changes nothing if one is not."""
        config = self.config
        for name, text in options.items():
            config = config.changed(name, text)
        self.config = config
        fresh = self.directory / "config.new"  # on a tmpfs: no disk is waited for
        fresh.write_text(config.to_json())
        fresh.rename(self.directory / "config")
        self.shares.total.rate = self.config.bandwidth
        self.residency.namespaces.share(self.shares)
        self.flow.admission.budget = self.config.nvme_writes
        self.flow.promotion.after = self.config.promote_after
        self.flow.demotion.reclaimable = self.config.reclaimable
        self.operations.timeout = self.config.entry_timeout
        logging.getLogger().setLevel(self.config.log_level.upper())
        self.residency.wake()
        return {}

    async def _write_back(self) -> dict[str, Any]:
        size, objects = self.flow.write_back.start()
        nvme = self.nvme
        down = nvme.health.why if nvme is not None and nvme.health.down else ""
        return {"bytes_left": size, "objects_left": objects, "down": down}

    async def _arm(self, faults: str) -> dict[str, Any]:
        """For tests: fail points of this daemon; says what was passed since the last time."""
        passed = dict(failpoints.passed)
        failpoints.arm(faults)
        return {"passed": passed}

    async def _discard_ram(self, *, on: bool, lasting: bool = False) -> dict[str, Any]:
        """Do not write back at the next unmount, if that comes soon or the order is lasting."""
        patience = float("inf") if lasting else DISCARD_PATIENCE
        self.discard_until = time.monotonic() + patience if on else 0.0
        return {}

    # Death

    def close(self, *, ended: bool) -> None:
        """Let go of the locks. `ended`: sync what must survive, and give the memory back."""
        catalog, nvme = self.catalog, self.nvme
        try:
            if catalog is not None:
                if ended and nvme is not None and self.session_number:
                    mounts.syncfs(nvme.root)
                    with catalog.batch() as batch:
                        batch.set_fact("clean", str(self.session_number))
                        batch.sync = True
                catalog.close()
        except (KvfsError, OSError) as error:
            log.error("%s: the session is not closed properly: %s", self.config.mountpoint, error)
        relied_on = self.takeover or self.serving or (self.ram is not None and self.ram.adopted)
        if self.ram is not None and (ended or not relied_on):
            self.ram.remove()
        if nvme is not None:
            nvme.close()
        self.catalog = self.ram = self.nvme = None


def _start_log(config: Config) -> None:
    path = config.log or runtime.log_path(config.mountpoint)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1
        )
    except OSError as error:
        raise ConfigError(f"log={path} cannot be written: {error}") from error
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[handler],
        force=True,
    )
    logging.captureWarnings(capture=True)


def _prepare(config: Config) -> None:
    """What this process needs of the system. Raises ConfigError."""
    _start_log(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a lease that somebody wanted back (Tier.shared)
    if os.geteuid() == 0:
        # Every open of every engine waits for this loop, which needs little of a CPU, but at once.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
        Path("/proc/self/oom_score_adj").write_text("0")  # the keeper's is not for us


def _serve(keeper: Channel, order: Message) -> None:
    """All of a daemon's life. Raises KvfsError, and whatever else it dies of."""
    config = Config.from_json(json.dumps(order["config"]))
    _prepare(config)
    mount = Mount(config, order, keeper)
    ended = False
    try:
        keeper.send("prepared")
        _, device = keeper.receive()
        mount.serving = True
        mount.backings.attach(device, mount.session_file, takeover=mount.takeover)
        trio.run(mount.serve)
        ended = True
    finally:
        mount.close(ended=ended)
    log.info("%s: ended", config.mountpoint)


def main() -> int:
    """The process that the keeper starts, with one end of a channel."""
    faulthandler.enable()
    # Whoever means the mount tells the keeper; all processes of a service get such a signal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: log.info("%s ignored", signal.strsignal(got)))
    keeper = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        keeper.send("loaded", version=__version__, protocol=PROTOCOL, format=FORMAT)
        order, _ = keeper.receive()
        _serve(keeper, order)
        keeper.send("ended")
    except Closed:
        return 0  # nobody wants us any more
    except Exception as error:
        refused = isinstance(error, ConfigError)
        if not refused:
            log.exception("ended by an error")
        with suppress(Closed):
            keeper.send("error", error=str(error) or repr(error), exit=2 if refused else 1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
