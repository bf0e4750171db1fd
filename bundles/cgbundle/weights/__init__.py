"""Loads weights from files into the memory of calls, and replaces them by `Program.update`."""
