"""Programs that use bundles for a long time, many threads or processes beside each other: `python -m tests.soak`."""
