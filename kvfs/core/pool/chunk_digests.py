"""The digests of the chunks of large objects: other nodes can read these objects while they come.

Contract: synchronous, and in memory only. A node knows the chunks of objects that programs have
written, or that came from other nodes, since its daemon's start. The index has them beside the
facts of an object. An object whose chunks nobody knows comes to other nodes as a whole.
"""

from kvfs.catalog import Inode
from kvfs.s3.chunks import LEAST, Chunks
from kvfs.tiers import OtherNodes


class ChunkDigests:
    """The known chunks of one mount, by inode and version."""

    def __init__(self, nodes: OtherNodes) -> None:
        self.nodes = nodes
        self._known: dict[int, tuple[int, Chunks | None]] = {}  # None: they cannot be had

    def may_stream(self, inode: Inode) -> bool:
        """Whether an object is so large that programs read it while it comes."""
        return 0 < self.nodes.stream <= inode.size and inode.size > LEAST and not inode.sparse

    def of(self, inode: Inode) -> Chunks | None:
        """The chunks of an object, None if they are not known."""
        version, found = self._known.get(inode.ino, (-1, None))
        return found if version == inode.version else None

    def lack(self, inode: Inode) -> bool:
        """Whether a large object has no chunks, and nothing has tried to compute them."""
        known = self._known.get(inode.ino)
        return self.may_stream(inode) and (known is None or known[0] != inode.version)

    def note(self, inode: Inode, chunks: Chunks | None) -> None:
        """Note the chunks of a large object; None if they cannot be had."""
        if self.may_stream(inode):
            self._known[inode.ino] = inode.version, chunks

    def forget(self, ino: int) -> None:
        """Forget an object that is not here any more."""
        self._known.pop(ino, None)
