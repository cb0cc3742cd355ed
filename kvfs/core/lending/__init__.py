"""Blocks that clients use by descriptor, without an open: read leases, write leases, `.match`."""
