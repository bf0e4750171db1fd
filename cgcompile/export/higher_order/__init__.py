"""Replaces higher-order operators (`expand`) and composite operators of an exported program by their operations."""
