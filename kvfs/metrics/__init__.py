"""What Prometheus scrapes: the status of a mount as metric families, and who shows them.

Contract: that is a child of the daemon, which asks the control socket as any client does, so the
daemon's loop has one small answer to give and never waits for a scraper. Names of namespaces are
the only ones in labels: no file, path, user or credential. docs/metrics.md explains each metric.
Not for people: that is `kvfs status`.
"""
