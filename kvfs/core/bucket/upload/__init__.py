"""Objects that go up to the bucket, keys that are deleted there, and the backlog of both."""
