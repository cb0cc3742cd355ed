"""Renames: give a file or directory another name, or exchange two names.

Contract: `rename` is synchronous and one catalog batch; it awaits nothing between its checks and
the commit. A namespace's directory stays at the top. A file that moves into another namespace is
accounted there. If a directory moves there, kvfs accounts its content later, in the background. If
the new name exists already, it keeps its cookie. Before a rename, its caller makes room in quotas:
`amounts_below` counts the content of directories, and `arrivals` returns what each namespace gets.
Not for making or removing names.
"""

from collections.abc import Mapping
from typing import NamedTuple

import trio

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode
from kvfs.core.names.tree import Tree
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import (
    ExistsError,
    InvalidError,
    IsADirError,
    NotADirError,
    NotFoundError,
    OtherNamespaceError,
)
from kvfs.tiers import Tier

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # linux/fs.h
COUNTED_MAX = 10_000  # names below a directory: some 0.1 s, in which the kernel has it locked
COUNTED_AT_ONCE = 16  # names that one turn of the loop counts; each takes some 10 us

RenameArguments = tuple[int, bytes, int, bytes, int]  # the arguments of `rename`
Amount = tuple[int, int]  # bytes and objects, as a quota counts them


class Move(NamedTuple):
    """A rename after its checks.

    source_dir: the directory that has `entry`, the name of `inode`. target_dir: the directory of
    the new name. target: the entry and inode that have the new name already, or None.
    """

    source_dir: Inode
    entry: Dentry
    inode: Inode
    target_dir: Inode
    target: tuple[Dentry, Inode] | None


class Renames:
    """Renames the inodes of a tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.catalog = tree.catalog
        self.ledger = tree.ledger
        self.namespaces = tree.namespaces

    def rename(self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int) -> None:
        """rename(2) with RENAME_NOREPLACE or RENAME_EXCHANGE; other flags raise InvalidError."""
        move = self._check_rename((parent, name, parent2, name2, flags))
        source_dir, entry, inode, target_dir, target = move
        if target is not None and target[1].ino == inode.ino:
            return  # two names of one file: rename(2) does nothing
        if flags == RENAME_EXCHANGE and target is not None:
            self._exchange(move, *target)
            return
        with self.catalog.batch() as batch:
            if target is not None:
                self._replace(target_dir, *target, batch)
            batch.unlink(parent, entry)
            cookie = self.catalog.next_id() if target is None else target[0].cookie
            moved = Dentry(name2, inode.ino, cookie)
            self._move(inode, entry, source_dir, target_dir, moved, batch)
            self.tree.touch(source_dir, batch)
            self.tree.touch(target_dir, batch)
            batch.answers()

    def _check_rename(self, names: RenameArguments) -> Move:
        parent, name, parent2, name2, flags = names
        if flags not in {0, RENAME_NOREPLACE, RENAME_EXCHANGE}:
            raise InvalidError(f"rename flags {flags}, expected NOREPLACE or EXCHANGE")
        source_dir = self.tree.directory(parent)
        target_dir = source_dir if parent2 == parent else self.tree.directory_for_new_entry(parent2)
        if not target_dir.links:
            raise NotFoundError(f"{self.catalog.named(parent2)} was removed")
        if name2 in {b".", b".."}:
            raise ExistsError(f"{name2!r} cannot be replaced")
        entry, inode = self.tree.expect(parent, name)
        target = self.tree.entry(parent2, name2)
        if inode.is_dir:
            self._check_descent(inode.ino, parent2)
        self._check_namespace(inode, target_dir)
        if flags == RENAME_EXCHANGE:
            _, inode2 = target or self.tree.expect(parent2, name2)
            if inode2.is_dir and inode2.ino != inode.ino:
                self._check_descent(inode2.ino, parent)
            self._check_namespace(inode2, source_dir)
        elif target is not None and flags == RENAME_NOREPLACE:
            raise ExistsError(f"{name2!r} exists")
        elif target is not None and target[1].is_dir != inode.is_dir:
            raise (IsADirError if target[1].is_dir else NotADirError)(
                f"{name2!r} cannot be replaced by what is of another kind"
            )
        return Move(source_dir, entry, inode, target_dir, target)

    def _crossing(self, names: RenameArguments) -> Move | None:
        """Return the checked rename if it moves an inode into another namespace, else None."""
        parent, _, parent2, _, _ = names
        if parent == parent2:  # the usual rename
            return None
        directories = [self.ledger.table.inode(ino) for ino in (parent, parent2)]
        if len({None if one is None else one.namespace for one in directories}) == 1:
            return None
        move = self._check_rename(names)
        # The inode may have the new namespace already. Then its old directory still has another
        # one, because a walk that accounts directories anew has not come to it yet.
        return None if move.inode.namespace == move.target_dir.namespace else move

    async def amounts_below(self, names: RenameArguments) -> dict[int, Amount]:
        """Count the content of each directory that a rename moves into a hard quota.

        Returns the bytes and objects below a directory, by its inode number. Awaits.

        Raises OtherNamespaceError if a directory has more than COUNTED_MAX names below it: the
        kernel has the directory locked meanwhile. A program such as mv then copies the directory,
        and the quota checks each file. Raises the errors of `rename` as well.
        """
        move, flags = self._crossing(names), names[-1]
        if move is None:
            return {}
        moved, into = [move.inode], [move.target_dir]
        if move.target is not None and flags == RENAME_EXCHANGE:
            moved.append(move.target[1])
            into.append(move.source_dir)
        if not any(self.namespaces.of(one).has_hard_quota for one in into):
            return {}
        return {one.ino: await self._count_below(one) for one in moved if one.is_dir}

    async def _count_below(self, top: Inode) -> Amount:
        """Count the files below a directory. Raises OtherNamespaceError for too many names."""
        size, names = 0, 0
        files: set[int] = set()  # a file with several names counts once
        way = [(top.ino, 0)]
        while way:
            ino, cookie = way.pop()
            entries = self.catalog.entries_after(ino, cookie, COUNTED_AT_ONCE)
            if len(entries) == COUNTED_AT_ONCE:
                way.append((ino, entries[-1].cookie))
            for entry in entries:
                inode = self.ledger.table.inode(entry.ino)
                if inode is not None and inode.is_dir:
                    way.append((inode.ino, 0))
                elif inode is not None and inode.is_file and inode.ino not in files:
                    files.add(inode.ino)
                    size += self._size_of(inode)
            names += len(entries)
            if names > COUNTED_MAX:
                raise OtherNamespaceError(
                    f"{self.catalog.named(top.ino)} has more than {COUNTED_MAX} names below it: it "
                    "cannot move into a namespace with a hard quota"
                )
            await trio.lowlevel.checkpoint()
        return size, len(files)

    def arrivals(
        self, names: RenameArguments, below: Mapping[int, Amount]
    ) -> list[tuple[Namespace, int, int]]:
        """Return the namespaces that would have more after a rename, with the added amounts.

        Each item has the namespace, the added bytes and the added objects. below: the result of
        `amounts_below`. Raises the errors of `rename`.
        """
        move, flags = self._crossing(names), names[-1]
        if move is None:
            return []
        source_dir, _, inode, target_dir, target = move
        comes, goes = self._amount_of(inode, below), (0, 0)
        if target is not None and (flags == RENAME_EXCHANGE or self._is_last(target[1])):
            goes = self._amount_of(target[1], below)
        more = (comes[0] - goes[0], comes[1] - goes[1])
        found = [(self.namespaces.of(target_dir), *more)]
        if flags == RENAME_EXCHANGE:
            found.append((self.namespaces.of(source_dir), -more[0], -more[1]))
        return [one for one in found if one[1] > 0 or one[2] > 0]

    def _amount_of(self, inode: Inode, below: Mapping[int, Amount]) -> Amount:
        return (self._size_of(inode), 1) if inode.is_file else below.get(inode.ino, (0, 0))

    def _size_of(self, inode: Inode) -> int:
        """Return the bytes of a file; for a file that is being written, those that it has now."""
        held = self.ledger.table.staging.get(inode.ino)
        return max(Tier.cost(inode.blocks), 0 if held is None else held.taken)

    def _is_last(self, inode: Inode) -> bool:
        """Whether kvfs removes the inode with this name: it has one name, and is not open."""
        return len(inode.links) == 1 and inode.ino not in self.ledger.table.open

    def _exchange(self, move: Move, entry2: Dentry, inode2: Inode) -> None:
        source_dir, entry, inode, target_dir, _ = move
        with self.catalog.batch() as batch:
            batch.unlink(source_dir.ino, entry)  # unlink both names before either is linked again
            batch.unlink(target_dir.ino, entry2)
            moved, moved2 = entry2._replace(ino=inode.ino), entry._replace(ino=inode2.ino)
            self._move(inode, entry, source_dir, target_dir, moved, batch)
            self._move(inode2, entry2, target_dir, source_dir, moved2, batch)
            self.tree.touch(source_dir, batch)
            self.tree.touch(target_dir, batch)
            batch.answers()

    def _move(
        self,
        inode: Inode,
        entry: Dentry,
        source_dir: Inode,
        target_dir: Inode,
        moved: Dentry,
        batch: Batch,
    ) -> None:
        """Give an inode the name `moved` in place of `entry`, which the caller has unlinked.

        If the name existed before, `moved` has its cookie, so that a listing shows the name once.
        """
        before = batch.change(inode)
        old, new = (source_dir.ino, entry.cookie), (target_dir.ino, moved.cookie)
        inode.links = tuple(new if link == old else link for link in inode.links)
        inode.ctime_ns = self.tree.now()
        source_dir.subdirs -= inode.is_dir
        target_dir.subdirs += inode.is_dir
        batch.link(target_dir.ino, moved)
        if inode.is_dir:
            if target_dir.ino == ROOT_INO:
                self.namespaces.pool_made(moved.name, batch)
            self._move_directory(inode, target_dir, batch)
        else:
            self.namespaces.places.place(inode, target_dir, moved.name, batch)
            if inode.links[0] == new:
                self.ledger.dirty.on_new_name(inode, batch, target_dir, moved.name)
            if _place_of(inode) != _place_of(before):
                self.tree.account_anew(before, inode, target_dir, moved.name, batch)
        batch.put(inode)

    def _move_directory(self, inode: Inode, target_dir: Inode, batch: Batch) -> None:
        """Move a directory, and mark it if its content needs other accounts or other keys.

        A walk in the background then changes all inodes below the directory.
        """
        batch.then(self.namespaces.places.forget_paths)
        inode.key = inode.parent_key = 0  # not a block's directory any more: see `Prefixes`
        if inode.namespace not in (inode.ino, target_dir.namespace):
            inode.namespace = target_dir.namespace
            self.namespaces.account_anew(inode.ino, batch)
        elif self.ledger.dirty.keeps_marks:  # its files get other keys in the bucket
            self.namespaces.account_anew(inode.ino, batch)

    def _check_namespace(self, inode: Inode, target_dir: Inode) -> None:
        if self.namespaces.own(inode.ino) and target_dir.ino != ROOT_INO:
            named = self.catalog.named(inode.ino)
            raise OtherNamespaceError(f"{named} is a namespace: it stays at the top")
        if len(inode.links) > 1 and not inode.is_dir and inode.namespace != target_dir.namespace:
            named = self.catalog.named(inode.ino)
            raise OtherNamespaceError(
                f"{named} has other names: it cannot move to another namespace"
            )

    def _replace(self, directory: Inode, entry: Dentry, old: Inode, batch: Batch) -> None:
        if old.is_dir:
            self.tree.remove_directory(directory, entry, old, batch)
        else:
            self.tree.remove_name(directory.ino, entry, old, batch)

    def _check_descent(self, ino: int, into: int) -> None:
        """Check that a directory does not move below itself."""
        while into != ROOT_INO:
            if into == ino:
                raise InvalidError(f"{self.catalog.named(ino)} cannot move into itself")
            into = self.tree.parent(self.tree.directory(into)).ino


def _place_of(inode: Inode) -> tuple[int, int, int, int, bool, bytes]:
    """Return the fields of an inode on which its accounts and its order of eviction depend."""
    return (
        inode.namespace,
        inode.key,
        inode.parent_key,
        inode.model,
        inode.unevictable,
        inode.target,
    )
