"""The self-test without a GPU: runs a recording's rows on the CPU over poisoned memory, kernels in Triton's front end."""
