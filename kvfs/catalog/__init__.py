"""The truth about names and placement, kept in RocksDB. Only this package knows keys."""

from kvfs.catalog.catalog import FORMAT, Batch, Catalog, Dentry
from kvfs.catalog.inode import LINK_MAX, ROOT_INO, Inode

__all__ = ["FORMAT", "LINK_MAX", "ROOT_INO", "Batch", "Catalog", "Dentry", "Inode"]
