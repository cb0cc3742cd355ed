"""The control socket: one JSON line asks, one JSON line answers.

Contract: the socket is in the mount's private runtime directory, so only root and the user of the
mount can open it. Not for data, nor for requests with a late reply: one request starts long work,
and others ask for its progress.
"""

from kvfs.control.client import (
    of_another_user,
    request,
    request_keeper,
    request_within,
    unanswered,
)

__all__ = ["of_another_user", "request", "request_keeper", "request_within", "unanswered"]
