"""The version of cgcompile.  Both pyproject.toml files contain the same version."""

VERSION = "0.1.0"
