"""The daemon of one mount: the only place that knows everything.

Contract: one trio loop, in which nothing waits for a disk, a network or a hash. It is started by
the keeper, tells it how far it has come (control/channel.py), and serves the /dev/fuse that it is
given. Order of birth: code, tiers and locks, catalog, what the predecessor or the last mount left,
the kernel's requests, background work. It may die at any instruction: the next one goes on from
the catalog, the tiers and the session file. Only when the file system was unmounted, by whomever,
does it write back what only RAM held, and end the session properly.
"""
