"""Code of cgcompile in bundles: PTX, which ptxas assembles for an architecture, and C++ for CPUs without libtorch."""
