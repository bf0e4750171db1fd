"""Code that bundles contain: PTX, with ptxas to assemble it for an architecture, and C++ for a CPU without libtorch."""
