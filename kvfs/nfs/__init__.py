"""NFS export of a mount: the configuration of an NFS server, and one that kvfs runs.

`export.py` has the export and its clients, as configuration files. `servers.py` runs nfs-ganesha,
which serves the mount from user space, or tells the kernel's server. Not for bytes: a server opens
the mount's files as any other program does, by file handle.
"""
