"""Helpers for all stages.  From cgcompile they import only its errors."""
