"""Operators that are no more than their operations, taken out of an exported program: higher-order ones (`expand`), composites."""
