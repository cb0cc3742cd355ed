"""Turns, room and prefetch: shared by the fetches from a bucket and from other nodes."""
