"""Code for the CPU (the cpu target, and host regions between graphs): AOTInductor's shared objects, run without importing torch."""
