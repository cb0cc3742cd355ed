"""The place of a file: its namespace, and the facts that its name tells there.

Contract: an inode that gets a name is placed in the batch that names it. It is accounted to the
namespace of its directory. From its name it gets the key of its block, the key of the block before
that in its prompt, its model, and whether only its owner unlinks it (`kvfs.layouts`). The catalog
numbers the models. Synchronous. Not for accounts, nor for settings.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

from kvfs import layouts
from kvfs.catalog import ROOT_INO, Batch, Catalog, Inode, keys
from kvfs.core.namespaces.namespace import Namespace
from kvfs.settings import Settings

PATHS_REMEMBERED = 4096  # directories, about 0.5 MiB
PIN = b"user.kvfs.pin"  # of a file: see `pins`
MODELS_MAX = 10_000  # more are not told apart
# A create asks for its block when it chooses a tier, and again after its last await, when its
# directory may have another path. Creates that run together fit.
_recognise = lru_cache(maxsize=64)(layouts.recognise)


class Places:
    """The places of files. `namespace` gives the namespace to which an inode is accounted."""

    def __init__(self, catalog: Catalog, namespace: Callable[[Inode], Namespace]) -> None:
        self.catalog = catalog
        self.models: dict[int, tuple[str, str]] = {}  # number -> engine, model
        self._namespace = namespace
        self._numbers: dict[tuple[str, str], int] = {}
        self._paths: OrderedDict[int, layouts.Directory] = OrderedDict()
        for number, value in catalog.marks(keys.MODELS):
            engine, _, model = value.decode("utf-8", "surrogateescape").partition("\0")
            self._know(number, engine, model)

    def place(self, inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        """Account an inode to its directory's namespace, and read the facts from its name."""
        inode.namespace = directory.namespace
        if not inode.is_file:
            self._paths.pop(inode.ino, None)
            return
        block = self.block_of(directory, name)
        if block is None:
            inode.key, inode.parent_key = layouts.key_of(directory.ino, name), 0
            inode.target = b""
            inode.model, inode.unevictable = 0, self.is_pinned(inode)
            return
        # A file that waits for its rename is the block already: policies and ghosts see one use.
        inode.key = block.key
        inode.parent_key = (
            block.parent_key
            or self._linked_parent(directory, block)
            or self._namespace(inode).opens.follows(inode.key)
        )
        inode.target = block.shard.encode() if block.number else b""
        inode.model = self._number(block.engine, block.model, batch)
        inode.unevictable = self._keeps(inode, block) or self.is_pinned(inode)

    def _keeps(self, inode: Inode, block: layouts.Block) -> bool:
        """Whether a file is unevictable: its connector treats a missing file as an error."""
        default = self._namespace(inode).settings.eviction == Settings().eviction
        droppable = block.temporary or layouts.LIVES[block.layout].droppable
        return default and not droppable

    def keeps(self, inode: Inode) -> bool:
        """Whether a file is unevictable by its first name."""
        block = self.block(inode)
        return block is not None and self._keeps(inode, block)

    def is_pinned(self, inode: Inode) -> bool:
        """Whether a user has pinned a file; a pinned file is kept."""
        return inode.unevictable and self.catalog.xattr(inode.ino, PIN) is not None

    def block_of(self, directory: Inode, name: bytes) -> layouts.Block | None:
        """The block that a file's name stands for; None if no connector makes such names."""
        return _recognise(self.path(directory), name)

    def is_temporary(self, directory: Inode, name: bytes) -> bool:
        """Whether its connector is going to rename a file of this name."""
        block = self.block_of(directory, name)
        return block is not None and block.temporary

    def lacks_key(self, inode: Inode) -> bool:
        """Whether only a rename will tell the block of a file: its name is a temporary one."""
        block = self.block(inode)
        return block is not None and block.temporary and not block.block

    def path_of(self, inode: Inode) -> layouts.Directory | None:
        """The path of a file from its namespace's directory down; None if it has no name."""
        found = self.catalog.first_name(inode)
        return None if found is None else (*self.path(found[0]), found[1].name)

    def keys(self, directory: Inode, name: bytes) -> tuple[int, int]:
        """The keys that a file of this name would have: its own, and its predecessor's."""
        block = self.block_of(directory, name)
        if block is None:
            return layouts.key_of(directory.ino, name), 0
        return block.key, block.parent_key

    def element_size(self, inode: Inode) -> int | None:
        """Bytes of a number in a file, if its first name tells them."""
        block = self.block(inode)
        return None if block is None else block.element_size

    def block(self, inode: Inode) -> layouts.Block | None:
        """The block that a file's first name stands for; None if there is none."""
        found = self.catalog.first_name(inode)
        return None if found is None else self.block_of(found[0], found[1].name)

    def _linked_parent(self, directory: Inode, block: layouts.Block) -> int:
        """The key of the block before, from VUA's symbolic link beside the files; 0: none."""
        if block.engine != "vua":
            return 0
        entry = self.catalog.lookup(directory.ino, b"parent")
        inode = None if entry is None else self.catalog.inode(entry.ino)
        if inode is None or not inode.target:
            return 0
        keys = layouts.link(self.path(directory), b"parent", inode.target)
        return 0 if keys is None else keys[1]

    def path(self, directory: Inode) -> layouts.Directory:
        """Names from the namespace's directory down to this one."""
        ino = directory.ino
        found = self._paths.get(ino)
        if found is None:
            found = self._find_path(directory)
            self._paths[ino] = found
            if len(self._paths) > PATHS_REMEMBERED:
                self._paths.popitem(last=False)
        return found

    def _find_path(self, directory: Inode) -> layouts.Directory:
        names: list[bytes] = []
        current: Inode | None = directory
        while current is not None and current.ino not in (ROOT_INO, directory.namespace):
            if not current.links:
                break
            parent, cookie = current.links[0]
            entry = self.catalog.dentry(parent, cookie)
            if entry is None:
                break
            names.append(entry.name)
            current = self.catalog.inode(parent)
        return tuple(reversed(names))

    def forget_paths(self) -> None:
        """Forget all paths: a directory got another name, or paths begin elsewhere."""
        self._paths.clear()

    def _number(self, engine: str, model: str, batch: Batch) -> int:
        known = self._numbers.get((engine, model))
        if known is not None:
            return known
        number = max(self.models, default=0) + 1
        if number > MODELS_MAX:
            return 0
        value = f"{engine}\0{model}".encode("utf-8", "surrogateescape")
        batch.mark(keys.MODELS, number, value)
        batch.then(lambda: self._know(number, engine, model))
        return number

    def _know(self, number: int, engine: str, model: str) -> None:
        self.models[number] = engine, model
        self._numbers[engine, model] = number
