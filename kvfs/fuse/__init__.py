"""The kernel's face: decodes requests, calls the core, maps errors. Holds no policy."""
