"""`python -m kvfs`: the command line, for machines without the `kvfs` script on the path."""

from kvfs.cli import main

main(prog_name="kvfs")
