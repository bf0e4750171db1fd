"""`python -m cgcompile_cli`: runs the command `cgcompile`."""

from .main import main

main()
