"""Who gets how much of what namespaces compete for: limits, fair queues, wear, and what is hot.

Nothing here knows tiers, files or records; whoever serves says what something costs.
"""
