"""Runs Inductor on a fake device, and records the launches of the Python wrapper that Inductor writes.  Runs in worker
processes."""
