"""What all users of a mount share in numbers: each may have half of what the others leave.

Contract: `take` notes an amount for a uid, or raises and notes nothing: UserLimitError where this
user has his part, TooManyOpenError where the mount has none left. So one user alone has half of
`most` at the most, and a next one always half of the rest; nobody is an exception, root neither.
Not for what is shared, nor for users with many uids.
"""

from collections import Counter

from kvfs.errors import TooManyOpenError, UserLimitError


class Portions:
    """`most` of `what`, of a mount. `what` is for messages."""

    def __init__(self, what: str, most: int) -> None:
        self.what = what
        self.most = most
        self.total = 0
        self.by_uid: Counter[int] = Counter()

    def take(self, uid: int, amount: int = 1) -> None:
        """Raises UserLimitError, TooManyOpenError."""
        left = self.most - self.total
        if left < 2 * amount:  # so nobody could have it
            raise TooManyOpenError(
                f"{self.total} of {self.most} {self.what} are taken by all users of this mount"
            )
        if self.by_uid[uid] + amount > left - amount:
            raise UserLimitError(
                f"uid {uid} has {self.by_uid[uid]} of {self.most} {self.what}: one user may have "
                "half of what the others leave"
            )
        self.add(uid, amount)

    def add(self, uid: int, amount: int) -> None:
        """Note what was taken before, of a daemon before; `amount` below 0 is given back."""
        self.total += amount
        self.by_uid[uid] += amount
        if not self.by_uid[uid]:
            del self.by_uid[uid]
