"""The comparison floor of the benchmarks: the least a pyfuse3 file system with passthrough can do.

One flat directory, no catalog, no tiers, no error handling, nothing survives. It is here to tell
what pyfuse3, trio and the kernel cost by themselves, and for nothing else: never use it.

start.py compiles passthrough.c, mounts and starts daemon.py.
"""
