"""Creates recordings for a GPU that is not present.  README.md has an overview."""
