"""The trace recorder: recordings for a GPU that is not there.

Everything is lowered to Triton and compiled for the named architecture; the launches of Inductor's own wrapper are written down,
every argument typed, memory planned by us, and proved by Triton's interpreter.  `traced` has the values that the stages pass on:

    works                           what has to be lowered: a program, or each of its graph regions where the host works between
    lowering_jobs, lower_child      ... at every int_key, in processes that have to believe in a GPU (`offline`)
    retracing                       the exported program at one size, on fake cuda tensors, in operations that have a Triton kernel
      decomposing, convolutions, attention, ordering      ... and what the others become
    folding, splitting              what weights alone decide is computed; products of few rows are cut (`pieces`)
    lowering, launches, variants    Inductor's wrapper, followed instead of run: launches, buffers, kernels with one configuration
      choosing, tuned, data/        ... which is chosen by measurements, or a model of cost
    compiling, compile_child        kernel images; `parameters` what an image says of its parameters, `toolkit` the driver it needs
    merging                         the regions of a key as one program, so that they share one arena
    planning, lifetimes             offsets in the arena, and the second opinion
    assembling, packing             rows of a bundle
    proving                         the program's steps as stages for the interpreter, and what it read against eager PyTorch
    interpreting, interpret_child   the rows run on the CPU: `blocks` takes them apart again, `lockstep`, `standins` run the kernels
    keeping, children, errors       results between builds, processes, refusals
"""
