"""The proof without a GPU: a recording's rows run on the CPU over poisoned memory.
Kernels run in Triton's front end over a builder of ours, many program instances at a time.
"""
