"""Runs in a recorder process: loads the program, captures every int_key, reads the graphs with the driver, and returns rows."""
