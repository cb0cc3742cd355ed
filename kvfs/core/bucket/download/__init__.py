"""Downloads from the bucket: for an open, ahead of it, or only the first bytes."""
