"""RocksDB holds all names, attributes and places of copies. Only this package knows its keys."""

from kvfs.catalog.batch import Batch
from kvfs.catalog.catalog import Catalog, Named
from kvfs.catalog.inode import LINK_MAX, ROOT_INO, Inode, PackedCopy
from kvfs.catalog.keys import BUCKET_KINDS, FORMAT, Dentry, Stored

__all__ = [
    "BUCKET_KINDS",
    "FORMAT",
    "LINK_MAX",
    "ROOT_INO",
    "Batch",
    "Catalog",
    "Dentry",
    "Inode",
    "Named",
    "PackedCopy",
    "Stored",
]
