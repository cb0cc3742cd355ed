"""The other nodes of a pool, as a place that the bytes of an open come from."""


class OtherNodes:
    """The other nodes. `hits` counts the opens for which kvfs fetched an object from one.

    `wait` (seconds) and `stream` (bytes) may change: see `Config`.
    """

    name = "pool"

    def __init__(self) -> None:
        self.hits = 0
        self.wait = 2.0
        self.stream = 0
