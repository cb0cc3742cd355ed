"""A TCP proxy before a store, which delays requests for ranges until a test lets them pass."""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

_RANGE = re.compile(rb"\r\nRange: bytes=(\d+)-", re.IGNORECASE)
_OBJECT = re.compile(rb"GET (?!\S*/\.kvfs/)")  # what is kvfs's own passes
_PIECE = 1 << 16


class Valve:
    """`asked` has the first byte of each requested range, in order.

    `brought`: bytes of the store's answers, with HTTP headers. `damage`: bytes to replace in the
    store's answers, by others of the same length.
    """

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._store = (host, int(port))
        self.asked: list[int] = []
        self.brought = 0
        self.damage: tuple[bytes, bytes] | None = None
        self._passes: Callable[[int], bool] = lambda _: True
        self._changed = threading.Condition()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def let(self, passes: Callable[[int], bool]) -> None:
        """From now on, let ranges pass that begin at such a byte; others wait."""
        with self._changed:
            self._passes = passes
            self._changed.notify_all()

    def open(self) -> None:
        """Let all pass."""
        self.let(lambda _: True)

    def close(self) -> None:
        """End all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self.open()
        self._accepting.join()

    def _accept(self) -> None:
        with self._listening, ExitStack() as stack:
            served = []
            while True:
                try:
                    client, _ = self._listening.accept()
                except OSError:  # closed
                    break
                store = stack.enter_context(socket.socket())
                stack.enter_context(client)
                if store.connect_ex(self._store):
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                served += [client, store]
                for do in (partial(self._up, client, store), partial(self._down, store, client)):
                    thread = threading.Thread(target=do)
                    thread.start()
                    stack.callback(thread.join)
            for one in served:
                _shut(one)

    def _up(self, client: socket.socket, store: socket.socket) -> None:
        def hold(data: bytes) -> bytes:
            found = _RANGE.search(data)
            if found is not None and _OBJECT.match(data):
                start = int(found[1])
                with self._changed:
                    self.asked.append(start)
                    self._changed.wait_for(lambda: self._passes(start))
            return data

        self._pass_on(client, store, hold)

    def _down(self, store: socket.socket, client: socket.socket) -> None:
        def harm(data: bytes) -> bytes:
            with self._changed:
                self.brought += len(data)
            return data.replace(*self.damage) if self.damage is not None else data

        self._pass_on(store, client, harm)

    @staticmethod
    def _pass_on(
        source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError):  # either side went away
            while data := source.recv(_PIECE):
                target.sendall(change(data))
        _shut(source)
        _shut(target)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):  # it went away first
        one.shutdown(socket.SHUT_RDWR)
