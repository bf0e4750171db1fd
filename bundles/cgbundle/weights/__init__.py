"""Loads weights from files into the memory of calls (`upload`, `host`). `update` reads and checks those of `Program.update`."""
