"""``python -m qkscope``: the command line."""

from qkscope.cli import main

main()
