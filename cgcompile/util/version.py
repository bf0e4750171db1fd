"""The version of cgcompile; both pyproject.toml say the same."""

VERSION = "0.1.0"
