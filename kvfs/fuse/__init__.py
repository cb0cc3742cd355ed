"""The kernel's side of kvfs: decodes requests, calls the core, maps errors. Holds no policy."""
