"""Inductor on a fake device, and the launches of the wrapper that it writes.  Runs in worker processes."""
