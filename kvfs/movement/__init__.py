"""Bytes on their way between tiers: done by worker processes, decided in the daemon."""
