"""The page of a mount, for people with a browser: docs/seeing.md.

Contract: a child of the daemon serves the page. It asks the control socket as any client does, and
only reads. For any number of browsers it asks the daemon for its status once in `history.STEP`
seconds; `page.Questions` bounds the questions about objects and single files. All that the browser
loads comes from here (`static`), and nothing from another host. Not for programs: that is
`kvfs.metrics`, in a process of its own, so that browsers do not delay the answer to a scrape.
"""
