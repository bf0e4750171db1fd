"""Runs Inductor on a fake device and records the launches of the wrapper that it writes.  Runs in worker processes."""
