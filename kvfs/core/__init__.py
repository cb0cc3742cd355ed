"""The life of objects and names, without a kernel in sight."""
