"""What the bucket has that this node does not know yet: lookups, listings and imports."""
