"""Recordings for a GPU that is not here; README.md has an overview."""
