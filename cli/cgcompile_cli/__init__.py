"""The command line of cgcompile: Typer commands and Rich output over `cgcompile` and `cgbundle`.

`main.py` wires, `errors.py` turns exceptions into text, `output.py` writes, and every command has a file of its own.
"""
