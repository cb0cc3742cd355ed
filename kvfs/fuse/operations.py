"""pyfuse3's operations: decode, call the core, answer.

Contract: no policy, and no state except the handle table. Domain errors become errno values here
and nowhere else. Any other exception is a defect, answered EIO and logged with its traceback,
because an exception that reaches pyfuse3 would end the mount.

A request may come again, if the daemon that read it died before it replied. Most operations can be
carried out twice. `once` is for those that cannot: the catalog knows whether the first time was
committed. A repeated OPEN or CREATE gets the handle that it was given.
"""

import errno
import functools
import inspect
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from kvfs.catalog import Inode
from kvfs.core.admin.lifecycle import PREFIX, WARM, Lifecycle
from kvfs.core.bucket.listing.bucket_listing import BucketListing
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.capacity import free_space
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.names.attributes import Attributes
from kvfs.core.names.renames import RENAME_EXCHANGE, Renames
from kvfs.core.names.tree import COOKIE_PARENT, HIDDEN_MAX, HIDDEN_STEP, Tree
from kvfs.core.namespaces.open_order import caller
from kvfs.core.objects.files import Backings
from kvfs.core.objects.objects import Objects
from kvfs.errors import (
    DEFECT,
    ConfigError,
    ExistsError,
    IsADirError,
    KvfsError,
    NoAttributeError,
    NotFoundError,
    NotPermittedError,
    OtherNamespaceError,
    UnsupportedError,
)
from kvfs.fuse.errnos import errno_of, shown
from kvfs.fuse.handles import Handles, Table
from kvfs.fuse.processes import Waits, is_nfs_server
from kvfs.fuse.second_tries import SecondTries
from kvfs.fuse.virtual_files import FIRST_VIRTUAL, VirtualFiles
from kvfs.tiers import sync_patience

if TYPE_CHECKING:
    from kvfs.core.pool.pool import Pool

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Operation = Callable[P, Coroutine[Any, Any, R]]

BLOCK = 4096  # f_bsize; LMCache divides by it, and turns O_DIRECT off for a larger one
FIRST_ENTRIES, MORE_ENTRIES = 24, 128  # what a small readdir buffer takes, and then some
TAKEOVER_STEP = 0.01  # s
NO_THREAD = -1  # of an operation whose request does not name its thread
# s. The kernel's own check of permissions follows at once, and would ask for them again. What a
# write changes it looks up anew in any case.
NEW_ATTRIBUTES = 0.05


class FuseKernel(Backings, Table, Protocol):
    """The part of the kernel's interface that operations use.

    It registers backing files and slots, and describes the present request (`request`,
    `requester`, `requested_inode`). It fills the answer to a READ, and tells the kernel of changed
    attributes.
    """

    def request(self) -> tuple[int, bool]: ...
    def requester(self) -> int: ...
    def requested_inode(self) -> int: ...
    def changed(self, ino: int) -> None: ...
    def fill(self, request: int, fd: int, offset: int, length: int, *, nowait: bool) -> bool: ...
    def resends_over(self) -> bool: ...


def answering(operation: Operation[P, R]) -> Operation[P, R]:
    """Answer errors of kvfs with their errno, and anything else with EIO."""
    name, parameters = operation.__name__, list(inspect.signature(operation).parameters)
    if name == "readdir":
        parameters[1] = "inode"  # which a directory has in place of a handle

    def call(self: object, *given: object) -> str:
        assert isinstance(self, Operations)
        return shown(name, map(self.named, parameters[1:], given))

    by_thread, paths = parameters[-1] == "ctx", 2 if name in {"link", "rename"} else 1

    @functools.wraps(operation)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        self: Any = args[0]
        tries = self.second_tries
        thread = cast("RequestContext", args[-1]).pid if by_thread else NO_THREAD
        if tries.threads:
            tries.begins(thread)
        try:
            return await operation(*args, **kwargs)
        except FUSEError:
            raise
        except KvfsError as error:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s: %s", call(*args), error)
            kind, code = type(error).__name__, errno_of(error)
            if code == errno.ESTALE and by_thread:
                code = self.refuse(thread, paths)
        except OSError as error:
            log.exception("%s failed", call(*args))
            code = error.errno or errno.EIO
            kind = errno.errorcode.get(code, "EIO")
        except Exception:
            log.exception("%s failed: a defect of kvfs", call(*args))
            kind, code = DEFECT, errno.EIO
        finally:
            if tries.threads:
                tries.ends(thread)
        self.errors[name, kind] += 1
        raise FUSEError(code)

    return answered


def _once(operation: Operation[P, R]) -> Operation[P, R]:
    """Carry out a change of names only once, even if its request comes again.

    The answer is then made from the inode that the first time made.
    """

    @functools.wraps(operation)
    async def once(*args: P.args, **kwargs: P.kwargs) -> R:
        self: Any = args[0]
        request, again = self.kernel.request()
        if again and request in self.answers.known:
            ino = self.answers.known[request]
            answer: Any = self._attributes(self.tree.inode(ino)) if ino else None
            return cast("R", answer)
        with self.answers.carrying_out(request):
            return await operation(*args, **kwargs)

    return answering(once)


def count_opens(tree: Tree, kernel: FuseKernel, opened: Sequence[OpenObject], began: float) -> None:
    """Count opens for reading, which have taken the time since `began` together."""
    ledger, now = tree.ledger, tree.now()
    namespaces = ledger.namespaces
    if unused := namespaces.unused([held.inode for held in opened], now):
        ledger.uses.note(unused, now)
        for inode in unused:  # a read would let the kernel ask for it; not each open has one
            kernel.changed(inode.ino)
    spent = (time.perf_counter() - began) / max(1, len(opened))
    for held in opened:
        if not held.brought_from:
            _count_joined(tree, held)
        found_in, held.brought_from = held.brought_from or held.tier.name, ""
        ledger.latencies.open[found_in].observe(spent)
        space = namespaces.of(held.inode)
        space.opens_timed += 1
        space.open_seconds += spent


def _count_joined(tree: Tree, held: OpenObject) -> None:
    """Count a further open of an object that is open."""
    if held.header is not None:
        return  # a scan is no use of an object
    comes = held.stream is not None and not held.stream.complete
    where = tree.ledger.tiers.bucket if comes else held.tier
    where.hits += 1
    tree.namespaces.read(held.inode, where, seen=0)


class Operations(pyfuse3.Operations):
    """The operations. `timeout`: s that the kernel may keep names and attributes of sealed files.

    It may change at any time.
    """

    supports_dot_lookup = True  # NFS handles
    enable_writeback_cache = False  # excludes passthrough

    def __init__(
        self,
        tree: Tree,
        objects: Objects,
        lifecycle: Lifecycle,
        kernel: FuseKernel,
        *,
        slots: int,
        timeout: float = 0.0,
        bucket_listing: BucketListing | None = None,
        pool: "Pool | None" = None,
        virtual: VirtualFiles | None = None,
    ) -> None:
        """bucket_listing, pool: None without a bucket or a pool. virtual: files beside the tree."""
        super().__init__()
        self.tree = tree
        self.renames = Renames(tree)
        self.attributes = Attributes(tree)
        self.lifecycle = lifecycle
        self.objects = objects
        self.ledger = objects.ledger
        self.answers = tree.catalog.answers
        self.kernel = kernel
        self.handles = Handles(slots, kernel)
        self.virtual = virtual or VirtualFiles()
        self.timeout = timeout
        self.waits = Waits()
        self.second_tries = SecondTries()
        # Answers that were errors, by operation and class of error.
        self.errors: Counter[tuple[str, str]] = Counter()
        self.bucket_listing = bucket_listing
        self.pool = pool
        self.bucket_lookup = None if bucket_listing is None else bucket_listing.bucket_lookup

    def named(self, parameter: str, value: object) -> object:
        """An argument for the log: an inode or a handle is the path of its object."""
        if not isinstance(value, int) or value >= FIRST_VIRTUAL:
            return value
        held = self.handles.held(value) if parameter == "fh" else None
        if held is None and "inode" not in parameter:
            return value
        return self.tree.catalog.named(value if held is None else held.inode.ino)

    def refuse(self, thread: int, paths: int) -> int:
        """Note that an operation finds its inode stale, and return the errno of its answer."""
        if self.second_tries.refused(thread, paths) and not is_nfs_server(thread):
            return errno.ENOENT  # the kernel would pass ESTALE to the program
        self.ledger.misses.refused(thread)
        return errno.ESTALE

    async def end_takeover(self) -> None:
        """When the kernel has sent all requests again, release handles that no request claimed."""
        if self.pool is not None:  # elsewhere an inode hardly goes twice
            self.second_tries.takes_over()
        while not self.kernel.resends_over():  # noqa: ASYNC110 (the C part has no events)
            await trio.sleep(TAKEOVER_STEP)
        self.answers.forget()
        for handle in self.handles.end_claims():
            log.info("%s: a program that had it open has died", self.named("fh", handle))
            await self.release(handle)

    # Attributes

    def _attributes(self, inode: Inode, *, listed: bool = False) -> EntryAttributes:
        """The attributes for the kernel. listed: from a listing, not from a look-up of the name."""
        held = self.ledger.table.staging.get(inode.ino)
        if held is not None:
            self.objects.files.measure(held)
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode.ino)
        entry.st_mode = pyfuse3.ModeT(inode.mode)
        hidden = held is not None and held.publish is not None
        entry.st_nlink = inode.nlink + hidden
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size
        entry.st_blocks = inode.blocks
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        # Set-id bits go when the file is written: nobody may act on an older mode.
        lasting = not (inode.is_file and inode.mode & (stat.S_ISUID | stat.S_ISGID))
        timeout = max(0.0, self.ledger.namespaces.of(inode).ttl_remaining(inode, self.timeout))
        if self.bucket_lookup is not None:
            timeout = self.bucket_lookup.ttl_remaining(inode, timeout, listed=listed)
        if self.pool is not None:
            timeout = self.pool.ttl_remaining(inode, timeout)
        entry.entry_timeout = timeout if lasting and not hidden else 0
        entry.attr_timeout = timeout if lasting and held is None else 0
        return entry

    attributes_of = _attributes

    def _entry(self, inode: Inode) -> EntryAttributes:
        """The answer of an operation by which the kernel learns of an inode."""
        if self.pool is not None:
            self.pool.kernel_lookups.answered(inode)
        return self._attributes(inode)

    def opened_fast(self, inode: Inode, thread: int) -> None:
        """Learn of an object in RAM that a thread opened without this loop."""
        if self.bucket_lookup is not None:
            self.bucket_lookup.open_predictor.opened(thread, inode.ino)
        if self.ledger.tiers.bucket.mounted:
            self.objects.promote(inode)  # the next blocks of its prompt
        if self.pool is not None:
            self.pool.recheck.look(inode)

    @answering
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if parent_inode >= FIRST_VIRTUAL or name in self.virtual.names:
            entry = self.virtual.lookup(parent_inode, name, ctx)
            if entry is not None:
                return entry
        tries = self.second_tries
        if tries.threads:
            tries.looks_up(ctx.pid, parent_inode, name)
        found = None
        try:
            found = await self._look_up(parent_inode, name, ctx.pid)
        except NotFoundError:
            self.ledger.absent_names.missed(parent_inode)
            self.ledger.misses.looked_up(parent_inode, name, ctx.pid)
            raise
        finally:
            if tries.threads and (found is None or found.is_file):
                tries.walked(ctx.pid, parent_inode, name)
        return self._entry(found)

    async def _look_up(self, parent: int, name: bytes, thread: int) -> Inode:
        """Look a name up here, in the pool and in the bucket. Raises NotFoundError."""
        if self.pool is not None:
            await self.pool.look_up(parent, name)
        bucket_lookup = self.bucket_lookup
        if bucket_lookup is not None:
            try:
                found = self.tree.lookup(parent, name)
                if not bucket_lookup.doubts(found):
                    return found
                await bucket_lookup.confirm(found, thread)
            except NotFoundError:
                await bucket_lookup.find(parent, name)
        return self.tree.lookup(parent, name)

    async def _complete(self, ino: int) -> None:
        """Fetch an inode's full attributes before a program sees them, if it is only a stub."""
        if self.bucket_lookup is not None:
            await self.bucket_lookup.fetch_metadata(ino)

    @answering
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        if inode >= FIRST_VIRTUAL:
            return self.virtual.of(inode).getattr(inode)
        found = self.tree.inode(inode)
        if is_stub(found):
            await self._complete(inode)
            found = self.tree.inode(inode)
        return self._attributes(found)

    @answering
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        self.virtual.refuse(inode)
        await self._complete(inode)
        found = self.tree.inode(inode)
        if is_stub(found):
            raise NotFoundError("the bucket has not said yet what it is")
        if fields.update_size:
            if not found.is_file:
                raise IsADirError("it has no size to change")
            found = await self.objects.truncate(inode, attr.st_size)
        if fields.update_mtime:
            await self.objects.touch(inode, attr.st_mtime_ns)
        if (
            fields.update_mode
            or fields.update_uid
            or fields.update_gid
            or fields.update_atime
            or fields.update_mtime
        ):
            found = self.attributes.change(
                inode,
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            )
        return self._attributes(found)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Purge inodes without a name.

        Other inodes stay. kvfs counts the kernel's references to remote objects only.
        """
        for inode, lookups in inode_list:
            self.ledger.removals.forgotten(inode)
            if self.pool is not None:
                self.pool.forgotten(inode, lookups)

    # Directories

    @answering
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        if inode >= FIRST_VIRTUAL:
            return inode
        found = self.tree.directory(inode).ino
        if self.pool is not None:  # first, as in look-ups: what nodes have comes from them
            await self.pool.listing.show(inode)
        if self.bucket_listing is not None:
            await self.bucket_listing.show(inode)
        return found

    @answering
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if fh >= FIRST_VIRTUAL:
            self.virtual.readdir(fh, start_id, token)
            return
        wanted = FIRST_ENTRIES
        if self.ledger.tiers.bucket.mounted:
            caller.set(self.kernel.requester())
            self.objects.scans.listed(fh)
        while True:
            entries, start_id, ended = self.tree.list_entries(fh, start_id, wanted)
            for name, inode, cookie in entries:
                attributes = self._attributes(inode, listed=True)
                if not pyfuse3.readdir_reply(token, name, attributes, cookie):
                    return
                if self.pool is not None:
                    self.pool.kernel_lookups.answered(inode)
            if entries:
                if ended or len(entries) < wanted:
                    return  # what was said so far must be true when it is sent: no turn of the loop
                wanted = MORE_ENTRIES
            elif ended or wanted == MORE_ENTRIES:
                return
            else:
                await trio.lowlevel.checkpoint()

    async def releasedir(self, fh: int) -> None:
        """Do nothing: the handle is the inode number."""

    async def fsyncdir(self, fh: int, datasync: bool) -> None:  # noqa: FBT001 (pyfuse3's)
        """Do nothing: names are committed before their operation is answered."""

    # Names

    @_once
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        self.virtual.refuse(parent_inode, name)
        self.ledger.misses.named(parent_inode, name, as_directory=True)
        async with self.tree.namespaces.pool_making(parent_inode, name):
            made = self.tree.make(parent_inode, name, mode, ctx.uid, ctx.gid)
        return self._attributes(made)

    @_once
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        self.virtual.refuse(parent_inode, name)
        self.ledger.misses.named(parent_inode, name)
        mode = stat.S_IFLNK | 0o777
        made = self.tree.make(parent_inode, name, mode, ctx.uid, ctx.gid, target=target)
        return self._attributes(made)

    @answering
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.tree.inode(inode).target

    @_once
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        self.virtual.refuse(parent_inode, name)
        self.ledger.misses.named(parent_inode, name)
        if not stat.S_ISREG(mode):
            made = self.tree.make(parent_inode, name, mode, ctx.uid, ctx.gid, rdev=rdev)
            return self._attributes(made)
        held = await self._create(parent_inode, name, mode, ctx)
        await self.objects.sealing.close(held, writable=True)
        return self._attributes(held.inode)

    @_once
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        self.virtual.refuse(inode)
        self.virtual.refuse(new_parent_inode, new_name)
        self.ledger.misses.named(new_parent_inode, new_name)
        return self._entry(self.tree.link(inode, new_parent_inode, new_name))

    @_once
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self.virtual.refuse(parent_inode, name)
        self.tree.unlink(parent_inode, name)

    @_once
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self.virtual.refuse(parent_inode, name)
        found, cookie = self.tree.lookup(parent_inode, name), COOKIE_PARENT
        if self.bucket_listing is not None and found.is_dir:  # what others have in it stays
            await self.bucket_listing.show(found.ino)
        if self.pool is not None and found.is_dir:
            await self.pool.listing.show(found.ino)
        for _ in range(HIDDEN_MAX // HIDDEN_STEP if found.is_dir else 0):
            entries, cookie, ended = self.tree.list_entries(found.ino, cookie, 1)
            if entries or ended:
                break
            await trio.lowlevel.checkpoint()  # what nobody finds has gone, some at a time
        self.tree.rmdir(parent_inode, name)

    @_once
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        self.virtual.refuse(parent_inode_old, name_old)
        self.virtual.refuse(parent_inode_new, name_new)
        self.ledger.misses.named(parent_inode_new, name_new)
        caller.set(ctx.pid)
        move = (parent_inode_old, name_old, parent_inode_new, name_new, flags)
        await self._show_below(parent_inode_old, name_old)
        if flags == RENAME_EXCHANGE:
            await self._show_below(parent_inode_new, name_new)
        below = await self.renames.amounts_below(move)
        await self.objects.quota.take_in(partial(self.renames.arrivals, move, below))
        if self.pool is None:
            self.renames.rename(*move)
        else:
            with self.pool.following(move[:2], move[2:4] if flags == RENAME_EXCHANGE else None):
                self.renames.rename(*move)

    async def _show_below(self, parent: int, name: bytes) -> None:
        """Make names of other nodes below a directory known, so that they move with it.

        Fetch an object that only other nodes of the pool have: its new name needs its bytes. Raises
        OtherNamespaceError, NotFoundError.
        """
        if self.pool is not None and (there := self.tree.lookup(parent, name)).in_pool:
            await self.pool.fetcher.fetch(there)
        if self.bucket_listing is None:
            return
        found = self.tree.lookup(parent, name)
        if found.is_dir and not await self.bucket_listing.show_below(found.ino):
            raise OtherNamespaceError(
                f"{self.tree.catalog.named(found.ino)} has more below it in the bucket than can be "
                "listed while the kernel holds it: it is to be copied"
            )

    # Files

    async def _create(self, parent: int, name: bytes, mode: int, ctx: RequestContext) -> OpenObject:
        caller.set(ctx.pid)
        directory, make = self.tree.maker(parent, name, mode, ctx.uid, ctx.gid)
        namespace = self.ledger.namespaces.of(directory)
        for_nfs = namespace.settings.publish == "close" and is_nfs_server(ctx.pid)
        return await self.objects.creation.create(directory, name, make, named_at_once=for_nfs)

    async def _wait_turn(self, inode: Inode, owed: int, *, written: bool) -> None:
        """Wait as the namespace's limits and its share of the mount's bandwidth require."""
        namespaces = self.ledger.namespaces
        namespace = namespaces.of(inode)
        if namespace.limits.on:
            await namespace.limits.acquire(inode.data, written=written)
        if namespaces.shares is not None:
            settings = namespace.settings
            await namespaces.shares.acquire(
                namespace.ino,
                owed,
                weight=settings.weight,
                bulk=settings.priority == "bulk",
            )

    async def _handle(self, held: OpenObject, *, writable: bool, request: int) -> FileInfo:
        try:
            handle = self.handles.add(held, writable=writable, request=request)
        except KvfsError:
            await self.objects.sealing.release(held, writable=writable)
            raise
        uncached, ino = self.ledger.records.stale_in_kernel, held.inode.ino
        keep = ino not in uncached
        if not keep:
            uncached.remove(ino)
        return FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=keep)

    async def _open(self, inode: int, flags: int, request: int, ctx: RequestContext) -> FileInfo:
        began = time.perf_counter()
        caller.set(ctx.pid)
        if self.bucket_lookup is not None:
            self.bucket_lookup.open_predictor.opened(ctx.pid, inode)
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        truncate = bool(flags & os.O_TRUNC)
        if self.ledger.namespaces.limited and not writable:
            found = self.tree.inode(inode)
            with self.waits.unless_killed(ctx.pid) as wait:
                await self._wait_turn(found, found.data, written=False)
            if wait.cancelled_caught:
                raise FUSEError(errno.EINTR)
        if truncate and not writable:
            await self.objects.truncate(inode, 0)
        held = None if writable else self.objects.open_at_once(inode)
        if held is None:
            await self._complete(inode)
            held = await self.objects.open(inode, writable=writable, truncate=truncate)
        if not writable:
            try:
                count_opens(self.tree, self.kernel, [held], began)
            except KvfsError:
                await self.objects.sealing.release(held, writable=writable)
                raise
        info = await self._handle(held, writable=writable, request=request)
        if self.second_tries.threads:
            self.second_tries.opened(ctx.pid)
        return info

    @answering
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if inode >= FIRST_VIRTUAL:
            handle = self.virtual.of(inode).open(inode, flags, ctx)
            return FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=True, keep_cache=False)
        request, again = self.kernel.request()
        if again and (claimed := self.handles.claim(request)) is not None:
            return FileInfo(fh=pyfuse3.FileHandleT(claimed), keep_cache=True)
        return await self._open(inode, flags, request, ctx)

    @answering
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        self.virtual.refuse(parent_inode, name)
        self.ledger.misses.named(parent_inode, name)
        request, again = self.kernel.request()
        if again and (handle := self.handles.claim(request)) is not None:
            inode = self.handles[handle].held.inode
            return FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=True), self._attributes(
                inode
            )
        try:
            if again and request in self.answers.known:  # made, but not yet opened
                held = await self.objects.open(self.answers.known[request], writable=True)
            else:
                with self.answers.carrying_out(request):
                    held = await self._create(parent_inode, name, stat.S_IFREG | mode, ctx)
        except ExistsError:
            # The kernel did not know the name. Without O_EXCL this is an open.
            if flags & os.O_EXCL:
                raise
            found = self.tree.lookup(parent_inode, name)
            if not found.is_file:
                raise
            info = await self._open(found.ino, flags, request, ctx)
            return info, self._entry(self.tree.inode(found.ino))
        info = await self._handle(held, writable=True, request=request)
        entry = self._attributes(held.inode)
        if held.publish is None:
            entry.attr_timeout = min(self.timeout, NEW_ATTRIBUTES)
        return info, entry

    @answering
    async def read(self, fh: int, off: int, size: int) -> bytes:
        if fh >= FIRST_VIRTUAL:
            return self.virtual.of(fh).read(fh, off, size)
        held = self.handles[fh].held
        if held.direct and not (held.header is not None and held.header.has(off, size)):
            request, _ = self.kernel.request()
            caller.set(self.kernel.requester())
            with self.waits.unless_killed(caller.get()) as wait:
                fd = await self.objects.incoming.wait_for_bytes(held, off, size)
            if wait.cancelled_caught:
                raise FUSEError(errno.EINTR)
            if self.kernel.fill(request, fd, off, size, nowait=held.tier.slow):
                return b""
        return await self.objects.read(held, off, size)

    @answering
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if fh >= FIRST_VIRTUAL:
            return await self.virtual.of(fh).write(fh, off, buf)
        return await self.objects.write(self.handles[fh].held, off, buf)

    @answering
    async def flush(self, fh: int) -> None:
        if fh >= FIRST_VIRTUAL:
            return
        handle = self.handles[fh]
        new = self.objects.sealing.flush(handle.held, writable=handle.writable)
        if new and self.ledger.namespaces.limited:
            held = handle.held
            owed = max(0, held.inode.data - held.charged)
            held.charged += owed  # before the wait: another writer may close it meanwhile
            await self._wait_turn(held.inode, owed, written=True)

    @answering
    async def release(self, fh: int) -> None:
        if fh >= FIRST_VIRTUAL:
            await self.virtual.of(fh).release(fh)
            return
        handle = self.handles.begin_release(fh)
        caller.set(0)  # the kernel does not say who had it
        if handle is None:  # it comes again: the predecessor has carried it out
            return
        try:
            await self.objects.sealing.release(handle.held, writable=handle.writable)
        finally:
            self.handles.end_release(fh)

    async def release_unsent(self) -> None:
        """Release the handles whose RELEASE the kernel has not sent before the mount ended.

        The last close of a detached mount ends it at once, and the kernel drops what the daemon has
        not read. Each close(2) has sent a FLUSH before, and had its answer: a file that is not
        sealed had none, and is not finished.
        """
        for number, handle in self.handles.taken().items():
            if handle.held.inode.sealed:
                with suppress(FUSEError):  # the kernel waits for no answer either
                    await self.release(number)

    @answering
    async def fsync(self, fh: int, datasync: bool) -> None:  # noqa: FBT001 (pyfuse3's)
        if fh >= FIRST_VIRTUAL:
            return
        held = self.handles[fh].held
        if held.doom is not None:
            raise held.doom
        if held.tier.slow and held.fd >= 0:
            sync = os.fdatasync if datasync else os.fsync
            patience = sync_patience(held.inode.size)
            try:
                await self.objects.files.on_file(held, "fsync", sync, patience)
            except OSError as error:
                inode = held.inode
                lose = partial(self.objects.verifier.lose, inode.ino, inode.version)
                self.ledger.retries.add(lose)
                raise self.objects.files.failed("fsync", held, error) from error

    # The file system

    @answering
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        """The room of a namespace: `kvfs.core.capacity.free_space`. pyfuse3 gives no inode."""
        inode = self.ledger.table.inode(self.kernel.requested_inode())
        namespaces = self.ledger.namespaces
        space = namespaces.default if inode is None else namespaces.of(inode)
        found = free_space.of_namespace(self.objects.creation.room, space)
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK
        data.f_blocks = found.size // BLOCK
        data.f_bfree = (found.size - found.used) // BLOCK
        data.f_bavail = found.available // BLOCK
        data.f_files = found.files
        data.f_ffree = data.f_favail = found.files - found.files_used
        data.f_namemax = 255
        return data

    @answering
    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        return True  # default_permissions: the kernel has checked

    @_once
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self.virtual.refuse(inode)
        if name.startswith(PREFIX):
            found = self.tree.inode(inode)
            with self._told(name, ctx, found):
                self.lifecycle.set_attribute(found, name, value)
            return
        self.attributes.set_xattr(inode, name, value)

    @answering
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if inode >= FIRST_VIRTUAL:
            raise FUSEError(errno.ENODATA)
        if name.startswith(b"system."):
            raise UnsupportedError(f"attribute {name!r}: no access control lists")
        if name.startswith(PREFIX):
            value = self.lifecycle.attribute(self.tree.inode(inode), name)
            if value is None:
                raise NoAttributeError(f"no attribute {name!r}")
            return value
        return self.attributes.xattr(inode, name)

    @answering
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        if inode >= FIRST_VIRTUAL:
            return []
        found = self.tree.inode(inode)
        return self.tree.catalog.xattr_names(inode) + self.lifecycle.attributes(found)

    @_once
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        self.virtual.refuse(inode)
        if name.startswith(PREFIX):
            found = self.tree.inode(inode)
            with self._told(name, ctx, found):
                self.lifecycle.reset_attribute(found, name)
            return
        self.attributes.remove_xattr(inode, name)

    @contextmanager
    def _told(self, name: bytes, ctx: RequestContext, inode: Inode) -> Iterator[None]:
        """Allow only root and the mount's owner, as the control socket; a file's owner may warm it.

        Write permission to the directory is not enough, because settings bind its writers too. A
        client gets only EINVAL for a wrong value: the log has the reason.
        """
        owns = name == WARM and ctx.uid == inode.uid
        if ctx.uid not in {0, os.geteuid()} and not owns:
            raise NotPermittedError(
                f"attribute {name.decode('ascii', 'replace')}: uid {ctx.uid} is neither root nor "
                f"uid {os.geteuid()}, who mounted"
            )
        try:
            yield
        except ConfigError as error:
            what = name.decode("latin-1").encode("unicode_escape").decode()
            why = str(error).encode("unicode_escape").decode()  # anybody's bytes are in it
            named = self.tree.catalog.named(inode.ino)
            log.warning("%s: attribute %.200s is refused: %.200s", named, what, why)
            raise

    def stacktrace(self) -> None:
        """Refuse: kvfs does not offer pyfuse3's debugging attribute."""
