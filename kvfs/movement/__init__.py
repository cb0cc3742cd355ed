"""Moves bytes between tiers: worker processes do the work, and the daemon decides."""
