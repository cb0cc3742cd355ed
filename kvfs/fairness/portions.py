"""A number that all users of a mount share: each may have half of what the others leave.

Contract: `charge` notes an amount for a uid, or raises and notes nothing. It raises UserLimitError
if this user has his part, TooManyOpenError if the mount has none left. So one user alone has at
most half of `most`, and the next one always half of the rest. Root has no exception. Not for the
shared things themselves, nor for users with many uids.
"""

from collections import Counter

from kvfs.errors import TooManyOpenError, UserLimitError


class Portions:
    """`most` of `what`, for one mount. `what` is for messages."""

    def __init__(self, what: str, most: int) -> None:
        self.what = what
        self.most = most
        self.total = 0
        self.by_uid: Counter[int] = Counter()

    def charge(self, uid: int, amount: int = 1) -> None:
        """Note an amount for a user. Raises UserLimitError, TooManyOpenError."""
        left = self.most - self.total
        if left < 2 * amount:  # even an unused uid could not have it
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
        """Note an amount that an earlier daemon's `charge` granted; below 0 it is given back."""
        self.total += amount
        self.by_uid[uid] += amount
        if not self.by_uid[uid]:
            del self.by_uid[uid]
