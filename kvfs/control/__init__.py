"""The control socket: one JSON line asks, one JSON line answers.

Contract: the socket is in the mount's private runtime directory, so who can open it is who mounted
it, or root. Not for data, nor for anything that needs a reply later: long work is started by one
request and looked at by others.
"""

from kvfs.control.client import request, request_keeper, request_within

__all__ = ["request", "request_keeper", "request_within"]
