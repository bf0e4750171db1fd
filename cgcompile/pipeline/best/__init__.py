"""`--autotune`: the program is lowered in several ways, each is recorded, proved and timed on the GPU, and at every int_key the
fastest is kept."""
