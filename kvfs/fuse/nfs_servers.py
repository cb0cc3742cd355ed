"""Whether it is an NFS server that asks.

With `publish=close` a new file has no name before its writer has closed it. That is for programs:
an NFS server looks what it makes up by name (nfs-ganesha's FSAL_VFS, vfs_open2), and has it open
for as long as it likes, beyond its client's CLOSE too; its client's rename would be ENOENT. So what
it makes has its name at once. A server that is not to be seen from here (of another PID namespace,
or with hidepid) is none.
"""

from pathlib import Path

from kvfs.core.objects.scans import process_of

NAMES = {"ganesha.nfsd", "nfsd"}  # of processes; threads may have names of their own


def is_nfs_server(thread: int) -> bool:
    """Two small files of /proc: some 30 us."""
    try:
        name = Path(f"/proc/{process_of(thread)}/comm").read_text("utf-8", "replace")
    except OSError:
        return False
    return name.strip() in NAMES
