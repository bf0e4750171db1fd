"""Helpers for all stages.  They import nothing else of cgcompile but its errors."""
