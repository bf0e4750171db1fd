"""Cross-compiled recordings; README.md has an overview."""
