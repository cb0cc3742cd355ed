"""The page of a mount, for people with a browser: docs/seeing.md.

Contract: a child of the daemon, which asks the control socket as any client does; it only reads.
However many look, the daemon is asked for its status once in `history.STEP` seconds, for objects
and for single files so often as `page.Questions` says. What the browser gets is from here only
(`static`): no other host is asked for anything. Not for programs: that is `kvfs.metrics`, whose
process is another one, so that a scrape has its answer whatever browsers do.
"""
