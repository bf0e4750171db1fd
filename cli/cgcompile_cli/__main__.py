"""`python -m cgcompile_cli`: the same as the command `cgcompile`."""

from .main import main

main()
