"""Objects in a bucket: the store itself, whole transfers, and what keys and metadata mean."""
