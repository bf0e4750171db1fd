"""The cpu target: AOTInductor compiles the program, or one host region, to a shared object with a C interface."""
