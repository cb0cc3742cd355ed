"""Finds objects of the bucket that this node does not know yet: lookups, listings, imports."""
