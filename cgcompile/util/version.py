"""The version of cgcompile; both pyproject.toml files contain the same."""

VERSION = "0.1.0"
