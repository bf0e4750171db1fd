"""The cpu target: AOTInductor compiles the program, or one host region, to a shared object with a C interface.

`build` is the target's part of a build.  `aoti` compiles a program, and has Inductor's options.  `compiler` writes the script that
sets -march for every file and records the options.  `compilations` runs compilers in parallel, `interface` compiles the code that
all models share, and `object_cache` reuses shared objects.  `products` decides whether `../kernels/standalone.cpp` replaces
libtorch.  `dispatch`, `loops`, `symbols` and `complex_numbers` change the code that Inductor generates.  `layouts` loads the code.

`../instruction_sets.py` has the levels of processors, and determines the instruction sets that the code needs.  At load,
cgbundle/format/variants.py and cgbundle/cpu/machine.py compare these sets with the processor.
"""
