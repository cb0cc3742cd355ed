"""A client of leases that is not kvfs.client: the format is public."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvfs import leasing


class Borrower:
    """One descriptor of a namespace's `.match`, and a pair of sockets."""

    def __init__(self, space: Path | str, *, offer: bool = True) -> None:
        self.fd = os.open(f"{space}/.match", os.O_RDWR | os.O_CLOEXEC)
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if offer:
            self.offer()

    def offer(self) -> None:
        """Send the number of the socket that the daemon takes."""
        self.say(leasing.pack_socket(self.theirs.fileno()))

    def say(self, question: bytes) -> None:
        assert os.pwrite(self.fd, question, 0) == len(question)

    def borrow(
        self, parent: bytes, keys: Sequence[bytes], size: int, shard: str = ""
    ) -> tuple[list[int], list[int]]:
        """Ask for blocks: (descriptors, leases)."""
        return self._ask(leasing.LeaseRequest(parent, list(keys), shard, size))

    def make(
        self, parent: bytes, keys: Sequence[bytes], size: int, shard: str = "", mode: int = 0o644
    ) -> tuple[list[int], list[int]]:
        """Ask for new blocks to write: (descriptors, leases)."""
        return self._ask(leasing.LeaseRequest(parent, list(keys), shard, size, mode=mode))

    def _ask(self, request: leasing.LeaseRequest) -> tuple[list[int], list[int]]:
        self.say(leasing.pack_request(request))
        answer, found, _, _ = socket.recv_fds(self.ours, 4096, leasing.BLOCKS_MAX)
        _, count, first = leasing.unpack_answer(answer)
        assert count == len(found)
        return list(found), list(range(first, first + count))

    def done(self, leases: Sequence[int]) -> None:
        self.say(leasing.pack_close(leases, leasing.DONE))

    def give_back(self, leases: Sequence[int]) -> None:
        self.say(leasing.pack_close(leases))

    def close(self) -> None:
        os.close(self.fd)
        self.ours.close()
        self.theirs.close()
