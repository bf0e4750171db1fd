"""Code of our own in bundles: PTX and the ptxas that assembles it for an architecture; C++ for a CPU without libtorch."""
