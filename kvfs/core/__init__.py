"""The life of objects and names, independent of the kernel's interface."""
