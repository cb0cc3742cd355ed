"""An operation as a log may have it.

Contract: one line of SHOWN printable characters at most; names as Python writes them, whatever
bytes they have; of what users have written, only how much it is. Not for what went wrong.
"""

from collections.abc import Sequence

SHOWN = 200  # characters
_PRIVATE = {"write": 2, "setxattr": 2}  # the argument that is users' bytes, by operation


def shown(operation: str, arguments: Sequence[object]) -> str:
    """Return the call, without what is nobody's business."""
    private = _PRIVATE.get(operation, -1)
    told = (
        f"<{len(found)} bytes>" if number == private and isinstance(found, bytes) else repr(found)
        for number, found in enumerate(arguments)
    )
    return f"{operation}({', '.join(told)})"[:SHOWN]
