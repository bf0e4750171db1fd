"""The cpu target: AOTInductor makes one shared object of the program, or of one host region.
The runtime calls it through its C interface.
"""
