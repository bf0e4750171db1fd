"""Code for the CPU: the cpu target, and host regions between graphs.
Shared objects by AOTInductor, run through its C interface without importing torch.
"""
