"""The command line of cgcompile: Typer commands and Rich output over `cgcompile` and `cgbundle`."""
