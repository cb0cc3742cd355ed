"""The textbook policies once more, on plain lists, each as its paper or libcachesim tells it.

As slow as can be, and without any of the tricks of kvfs/eviction: what those are checked against.
"""

from collections.abc import Sequence


class Lists:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[int] = []  # the next victim first

    def contains(self, key: int) -> bool:
        return key in self.queue

    def size(self) -> int:
        return len(self.queue)

    def add(self, key: int) -> None:
        self.queue.append(key)

    def touch(self, key: int) -> None:
        pass

    def take(self, incoming: int) -> int:  # noqa: ARG002
        return self.queue.pop(0)


class Fifo(Lists):
    pass


class Lru(Lists):
    def touch(self, key: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)


class Bimodal(Lru):
    added = 0

    def add(self, key: int) -> None:
        self.added += 1
        self.queue.insert(0 if self.added % 32 else len(self.queue), key)


class Lfu(Lists):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}

    def add(self, key: int) -> None:
        self.uses[key] = 1
        self.queue.append(key)

    def touch(self, key: int) -> None:
        self.uses[key] += 1
        self.queue.remove(key)  # the queue is in the order in which the counts were reached
        self.queue.append(key)

    def take(self, incoming: int) -> int:  # noqa: ARG002
        victim = min(self.queue, key=lambda key: self.uses[key])
        self.queue.remove(victim)
        return victim


class Sieve(Lists):
    """The oldest is at index 0."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.visited: set[int] = set()
        self.hand: int | None = None  # a key

    def touch(self, key: int) -> None:
        self.visited.add(key)

    def take(self, incoming: int) -> int:  # noqa: ARG002
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.queue[at] in self.visited:
            self.visited.remove(self.queue[at])
            at = (at + 1) % len(self.queue)
        victim = self.queue.pop(at)
        self.hand = self.queue[at] if at < len(self.queue) else None
        return victim


class S3Fifo(Lists):
    admit = False

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.uses: dict[int, int] = {}
        self.evicted = False
        self.returning = False

    def contains(self, key: int) -> bool:
        return key in self.small or key in self.main

    def size(self) -> int:
        return len(self.small) + len(self.main)

    def add(self, key: int) -> None:
        self.uses[key] = 0
        if self.returning or key in self.ghost:
            self.ghost = [other for other in self.ghost if other != key]
            self.main.append(key)
        elif self.admit and not self.evicted and len(self.small) >= int(self.capacity * 0.1):
            self.main.append(key)
        else:
            self.small.append(key)
        self.returning = False

    def touch(self, key: int) -> None:
        self.uses[key] += 1

    def take(self, incoming: int) -> int:
        self.evicted = True
        if incoming in self.ghost:
            self.ghost.remove(incoming)
            self.returning = True
        main_size = self.capacity - int(self.capacity * 0.1)
        from_small = len(self.main) <= main_size
        while from_small and self.small:
            key = self.small.pop(0)
            if self.uses[key] < 2:
                self.ghost = [*self.ghost, key]
                if len(self.ghost) > int(self.capacity * 0.9):
                    self.ghost.pop(0)
                return key
            self.uses[key] = 0
            self.main.append(key)
        while True:
            key = self.main.pop(0)
            if not self.uses[key]:
                return key
            self.uses[key] = min(self.uses[key], 3) - 1
            self.main.append(key)


class S3FifoAdmitting(S3Fifo):
    admit = True


class Arc(Lists):
    """Figure 4 of the paper, of which REPLACE and the directory's bound belong to `take`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def contains(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def size(self) -> int:
        return len(self.t1) + len(self.t2)

    def touch(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def get(self, key: int) -> bool:
        """All of an access, as the paper has it."""
        c = self.capacity
        if self.contains(key):
            self.touch(key)
            return True
        if key in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), c)
            self.b1.remove(key)
            self.replace(in_b2=False)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
            self.b2.remove(key)
            self.replace(in_b2=True)
            self.t2.append(key)
        else:
            self.case_four(c)
            self.t1.append(key)
        return False

    def case_four(self, c: int) -> None:
        if len(self.t1) + len(self.b1) == c:
            if len(self.t1) < c:
                self.b1.pop(0)
                self.replace(in_b2=False)
            else:
                self.t1.pop(0)
        elif (total := len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)) >= c:
            if total == 2 * c:
                self.b2.pop(0)
            self.replace(in_b2=False)

    def replace(self, *, in_b2: bool) -> None:
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p) or not self.t2):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def run(policy: Lists, trace: Sequence[int]) -> list[bool]:
    """Which accesses were hits."""
    hits = []
    for key in trace:
        if isinstance(policy, Arc):
            hits.append(policy.get(key))
            continue
        hits.append(policy.contains(key))
        if hits[-1]:
            policy.touch(key)
            continue
        while policy.size() >= policy.capacity:
            policy.take(key)
        policy.add(key)
    return hits
