"""The proof without a GPU: a recording's rows run on the CPU, kernels in Triton's front end, over poisoned memory."""
