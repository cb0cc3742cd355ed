"""The daemon of one mount: the only part that knows all other parts.

Contract: the daemon has one trio loop, in which nothing waits for a disk, a network or a hash. The
keeper starts it, hears its progress (control/channel.py), and gives it the /dev/fuse to serve. The
order of its start: code, tiers and locks, catalog, the state of the predecessor or the last mount,
the kernel's requests, background work. It may die at any instruction: the next daemon goes on from
the catalog, the tiers and the session file. Only after an unmount does the daemon write back the
objects that only RAM held, and end the session properly.
"""
