"""The self-test without a GPU: runs recordings on the CPU, in memory filled with poison, and kernels in Triton's front end."""
