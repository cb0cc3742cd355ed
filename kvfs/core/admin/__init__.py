"""Commands of an operator: namespaces, pins, usage and rankings."""
