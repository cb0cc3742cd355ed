"""NFS export of a mount: what an NFS server is to be told, and one that is run for it.

`export.py` is what is exported and to whom, as configuration files; `servers.py` runs nfs-ganesha,
which serves it from user space, or tells the kernel's server. Not for bytes: a server
opens the mount's files as any other program does, by file handle.
"""
