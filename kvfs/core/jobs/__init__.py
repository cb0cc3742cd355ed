"""Long work on many objects: sweeps for a command, eviction on demand, warming, scrubbing."""
