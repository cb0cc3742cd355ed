"""This node and its bucket: health of the connection, node record and claims."""
