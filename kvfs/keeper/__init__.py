"""The keeper: a small process that owns /dev/fuse, so that the mount outlives its daemon.

Contract: it mounts, starts the daemon, and starts the next one when that dies, stops answering or
is upgraded; the kernel keeps what clients have asked meanwhile. It holds no policy, looks at no
file of the mount (it would wait for the daemon that it has to start), and imports little.
"""
