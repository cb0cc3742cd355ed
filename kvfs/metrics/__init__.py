"""The metrics for Prometheus: the status of a mount as metric families, and their server.

Contract: a child of the daemon serves them, and asks the control socket as any client does. So the
daemon's loop gives one small answer, and never waits for a scraper. Names of namespaces are the
only names in labels: no file, path, user or credential. docs/metrics.md explains each metric. Not
for people: that is `kvfs status`.
"""
