"""`python -m kvfs`: the command line, for where the `kvfs` script is not on the path."""

from kvfs.cli import main

main(prog_name="kvfs")
