"""The version of cgcompile; pyproject.toml says the same."""

VERSION = "0.1.0"
