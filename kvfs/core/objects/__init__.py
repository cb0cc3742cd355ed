"""The content of files: open, create, write, seal and release.

Contract: one lock per inode, held across awaits of worker threads; names are not known here.
"""
