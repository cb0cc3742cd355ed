"""Simulates a cache of some size on a recorded trace, and tests whether a mount does the same.

Runs the very policies of `kvfs.eviction`. Knows nothing of mounts, tiers and bytes per second:
`replay` uses a directory as any program would. Not for the daemon.
"""
