"""`--autotune`: lowers the program in several ways.  Every lowering is recorded, verified and timed on the GPU.  The build keeps
the fastest one for every int_key."""
