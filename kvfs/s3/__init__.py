"""The bucket: the store itself, whole transfers, and the meaning of keys and metadata."""
