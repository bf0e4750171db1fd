"""The cpu target: AOTInductor makes one shared object of the program, or of one host region, called by its C interface."""
