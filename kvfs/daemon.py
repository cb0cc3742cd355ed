"""The daemon: wires everything, and is the only place that knows everything.

Contract: one trio loop, in which nothing waits for a disk, a network or a hash. `run` returns when
the file system was unmounted, by whomever, and what only RAM held was written back. Order of
birth: tiers and locks, catalog, what the last session left unfinished, mount, background work;
the end is the reverse. A second later mount finds all that was sealed.
"""

import faulthandler
import json
import logging
import logging.handlers
import os
import resource
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from kvfs import __version__, mounts, runtime
from kvfs.catalog import Catalog
from kvfs.config import Config
from kvfs.control import server
from kvfs.core.flow import Flow
from kvfs.core.objects import Objects
from kvfs.core.residency import Residency
from kvfs.core.tree import Tree
from kvfs.errors import ConfigError, KvfsError
from kvfs.fuse.invalidation import Invalidation
from kvfs.fuse.session import Session, open_backings
from kvfs.movement.movers import Movers
from kvfs.tiers import NvmeTier, RamTier

log = logging.getLogger(__name__)

DISCARD_PATIENCE = 60.0  # s between an order not to write back and the unmount
PRIORITY = -10  # its own share in the p99 of docs/benchmarks.md was not measured apart
LOG_BYTES, LOG_FILES = 10 << 20, 3


def run(config: Config, ready: Callable[[], None]) -> None:
    """Serve until unmounted. Raises ConfigError before anything was changed, else KvfsError."""
    _start_log(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    if os.geteuid() == 0:
        # Every open of every engine waits for this loop, which needs little of a CPU, but at once.
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    mount = Mount(config)
    try:
        trio.run(mount.serve, ready)
    finally:
        mount.close()
    if mount.refusal is not None:
        raise mount.refusal
    log.info("%s: ended", config.mountpoint)


class Mount:
    """All that a mounted kvfs consists of."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.discard_until = 0.0  # an unmount before this time writes nothing back
        self.refusal: ConfigError | None = None  # why the mount was given up at once
        self.nvme: NvmeTier | None = None
        self.ram: RamTier | None = None
        self.catalog: Catalog | None = None
        self.session_number = 0
        self.backings, self.slots, self.device = open_backings(config)
        try:
            self._open_tiers()
        except BaseException:
            self.close()
            if self.device >= 0:
                os.close(self.device)
            raise

    # Birth

    def _open_tiers(self) -> None:
        config = self.config
        identity = str(uuid.uuid5(uuid.NAMESPACE_URL, f"kvfs:{config.mountpoint}"))
        if config.nvme is not None:
            self.nvme = NvmeTier(config.nvme, config.nvme_size)
            self.nvme.grows = "nvme_size" in config.fitted
            self.nvme.say_who(f"process {os.getpid()}, mounted on {config.mountpoint}")
            identity = self.nvme.identity
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
        self.residency = self._begin_session(self.catalog)

    def _begin_session(self, catalog: Catalog) -> Residency:
        """Number this session, and say which earlier ones a power loss makes suspect.

        Those are the sessions after the last one that ended properly, if the machine went down
        since: their bytes may not have reached the disk, whatever the file system says.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        last = int(catalog.fact("session") or 0)
        ended = int(catalog.fact("clean") or 0)
        same_boot = catalog.fact("boot") == boot
        low, high = map(int, (catalog.fact("suspect") or "1 0").split())
        if ended < last and not same_boot:
            low, high = low if low <= high else ended + 1, last
        self.session_number = last + 1
        if ended < last:
            log.warning(
                "the last session did not end properly: %s",
                "its bytes are all there" if same_boot else "copies are verified before use",
            )
        self.invalidation = Invalidation(self._invalidate)
        residency = Residency(
            catalog,
            self.ram,
            self.nvme,
            session=self.session_number,
            suspect=range(low, high + 1),
            gone=self.invalidation.gone,
        )
        with catalog.batch() as batch:
            batch.set_fact("session", str(self.session_number))
            batch.set_fact("suspect", f"{low} {high}")
            batch.set_fact("boot", boot)
            if self.ram is not None:
                batch.set_fact("ram_epoch", str(self.ram.epoch))
            batch.sync = True
        Tree(residency).make_root(uid=os.geteuid(), gid=os.getegid())
        residency.first_new = catalog.next_id()  # what is older, the census has yet to count
        self._drop_unfinished(catalog, residency)
        return residency

    def _invalidate(self, parent: int, name: bytes) -> None:
        self.session.invalidate(parent, name)

    @staticmethod
    def _drop_unfinished(catalog: Catalog, residency: Residency) -> None:
        """What was being written, or open without a name, when the last session died."""
        for ino in catalog.unfinished():
            inode = catalog.inode(ino)
            if inode is not None and inode.sealed and inode.links:
                with catalog.batch() as batch:
                    batch.mark_finished(ino)
            elif inode is not None:
                residency.drop(inode, "unfinished")
            else:
                with catalog.batch() as batch:
                    batch.mark_finished(ino)

    # Life

    async def serve(self, ready: Callable[[], None]) -> None:
        config = self.config
        async with Movers.open(config.movers, self.residency.counters) as movers:
            self.movers = movers
            self.flow = Flow(
                self.residency,
                movers,
                promote_after=config.promote_after,
                reclaimable=config.reclaimable,
            )
            objects = Objects(
                self.residency,
                self.backings,
                self.flow,
                promote=self.flow.opened,
                settle=self.flow.settle,
            )
            # Only now: the C part must be loaded before pyfuse3 is.
            from kvfs.fuse.operations import Operations  # noqa: PLC0415

            self.operations = Operations(
                Tree(self.residency),
                objects,
                self.backings,
                slots=self.slots,
                timeout=config.entry_timeout,
            )
            directory = runtime.make_private(runtime.runtime_dir(config.mountpoint))
            self.session = Session(config, self.operations, self.device)
            try:
                await self._serve_mounted(ready, directory)
            finally:
                self.session.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def _serve_mounted(self, ready: Callable[[], None], directory: Path) -> None:
        self.invalidation.start()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    server.serve,
                    directory / "control.sock",
                    {
                        "status": self._status,
                        "set": self._set,
                        "write_back": self._write_back,
                        "discard_ram": self._discard_ram,
                    },
                )
                nursery.start_soon(self._unmount_on_signal)
                nursery.start_soon(self.flow.run)
                nursery.start_soon(self._announce, ready)
                await self.session.run()
                log.info("%s: unmounted", self.config.mountpoint)
                if time.monotonic() >= self.discard_until:
                    await self.residency.census_done.wait()
                    await self.flow.drain()
                nursery.cancel_scope.cancel()
            await self.flow.empty_trash()
        finally:
            if self.residency.open:
                log.warning("%d inodes were still open", len(self.residency.open))
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.invalidation.stop)

    async def _announce(self, ready: Callable[[], None]) -> None:
        """The mount is ready when it answers, which it does from another thread's view."""
        await trio.to_thread.run_sync(os.statvfs, self.config.mountpoint)
        if self.config.passthrough == "on" and not self.backings.on:
            self.refusal = ConfigError(f"passthrough=on, but {self.backings.why}; mount with auto")
            await trio.to_thread.run_sync(self.session.unmount)
            return
        as_wanted = self.backings.on or self.config.passthrough == "off"
        level = logging.INFO if as_wanted else logging.WARNING
        log.log(
            level,
            "%s: mounted, passthrough %s: %s",
            self.config.mountpoint,
            "on" if self.backings.on else "off",
            self.backings.why,
        )
        ready()

    async def _unmount_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                log.info("%s: unmounting on %s", self.config.mountpoint, signal.strsignal(number))
                await trio.to_thread.run_sync(self.session.unmount)

    # Control

    async def _status(self) -> dict[str, Any]:
        residency, config = self.residency, self.config
        ram = self.ram
        return {
            "version": __version__,
            "mountpoint": str(config.mountpoint),
            "daemon_pid": os.getpid(),
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
            "trash": self.flow.trash,
            "reclaimable_bytes": residency.reclaimable,
            "counters": dict(residency.counters),
            "options": config.as_options(),
        }

    async def _set(self, **options: str) -> dict[str, Any]:
        """Change hot options. Raises ConfigError and changes nothing if one is not."""
        config = self.config
        for name, text in options.items():
            config = config.changed(name, text)
        self.config = config
        self.flow.promote_after = self.config.promote_after
        self.flow.reclaimable = self.config.reclaimable
        self.operations.timeout = self.config.entry_timeout
        logging.getLogger().setLevel(self.config.log_level.upper())
        self.residency.wake()
        return {}

    async def _write_back(self) -> dict[str, Any]:
        size, objects = self.flow.write_back()
        return {"bytes_left": size, "objects_left": objects}

    async def _discard_ram(self, *, on: bool, lasting: bool = False) -> dict[str, Any]:
        """Do not write back at the next unmount, if that comes soon or the order is lasting."""
        patience = float("inf") if lasting else DISCARD_PATIENCE
        self.discard_until = time.monotonic() + patience if on else 0.0
        return {}

    # Death

    def close(self) -> None:
        """Sync what must survive, give the memory back, let go of the locks."""
        catalog, nvme = self.catalog, self.nvme
        try:
            if catalog is not None:
                if nvme is not None and self.session_number:
                    mounts.syncfs(nvme.root)
                    with catalog.batch() as batch:
                        batch.set_fact("clean", str(self.session_number))
                        batch.sync = True
                catalog.close()
        except (KvfsError, OSError) as error:
            log.error("%s: the session is not closed properly: %s", self.config.mountpoint, error)
        if self.ram is not None and self.session_number:
            self.ram.remove()
        if nvme is not None:
            nvme.close()


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


def main() -> int:
    """The process that `kvfs mount` starts: configuration on stdin, one line of JSON on stdout."""

    def answer(message: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler) and handler.stream is not None:
                os.dup2(handler.stream.fileno(), 2)  # a last word of the interpreter goes there

    faulthandler.enable()
    try:
        run(Config.from_json(sys.stdin.read()), lambda: answer({"ready": True}))
    except ConfigError as error:
        answer({"error": str(error), "exit": 2})
        return 2
    except Exception as error:
        log.exception("ended by an error")
        answer({"error": str(error) or repr(error), "exit": 1})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
