"""A catalog as the kvfs before namespaces wrote it: records of format 1, byte for byte.

`format1.json` has its keys and values in hexadecimal, read out of the RocksDB of that kvfs. These
are a file `a` on NVMe with a second name `d/a2` and an attribute, the directories `d` and `d/e`,
and a symbolic link `d/s`. The file `torn` was being written when the daemon died.
"""

import json
import os
from pathlib import Path

from kvfs.catalog import Catalog

A = 17  # the inode of `a`
CONTENT = b"old" * 1000
MTIME_NS = 1795280927843219492  # of its backing file, as its record has it


def write_format1(catalog: Path, nvme: Path) -> None:
    """Make that catalog, and the one backing file that it means below an NVMe tier's root."""
    made = Catalog(catalog)
    rows = json.loads(Path(__file__).with_name("format1.json").read_text())
    made.commit([(bytes.fromhex(key), bytes.fromhex(rows[key])) for key in rows], sync=False)
    made.close()
    file = nvme / "objects" / f"{A:02x}" / f"{A:x}.1"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_bytes(CONTENT)
    os.utime(file, ns=(MTIME_NS, MTIME_NS))
