"""The self-test without a GPU: runs recordings on the CPU."""
