"""Objects that come from the bucket: for an open, ahead of it, or their first bytes only."""
