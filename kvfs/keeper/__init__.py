"""The keeper: a small process that owns /dev/fuse, so that the mount outlives its daemon.

Contract: the keeper mounts and starts the daemon. It starts the next one when the daemon dies,
stops answering or is upgraded; meanwhile the kernel keeps the clients' requests. The keeper holds
no policy and imports little. It opens no file of the mount, because that would wait for the daemon
that it has to start.
"""
