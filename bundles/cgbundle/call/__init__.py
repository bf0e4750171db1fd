"""The way of a call, file by file.

1. `entry`: `Entry.__call__` takes tensors by position as they come, other arguments apart (`structure`).
   Where the guard of a known call passes, the call goes on at 5.
2. `plan`: guards compare dtypes, devices and shapes with the signature; a plan names the replays that serve the call, with
   the slices of every input and output (`pieces`, where the sizes were not recorded).  `entry` keeps plans by shapes, and cuts,
   pads and lays out the inputs of each replay.
3. `outputs`: runs a program of the session's backend on the inputs' addresses, and gives its outputs as the caller's tensors:
   copies, or views that the next call makes stale; `entry.builder` nests them as the model does.
4. `gpu.backend`, or `cpu.backend`: takes the session's turn (`locks`), puts the work behind the call before
   (`cuda.stream_order`), and replays the program that is bound to the session's memories: on a GPU `gpu.programs`, whose steps
   are launches of graphs (`cuda.graph_executor`).  The tensor library of the caller is in `tensors.library` and one more file.
5. `fast_path`: a repeated call of a GPU with the same layout is one guard of its library, then `gpu.fast_path`: the turn, the
   context, the launch and the outputs in one function.

So a known call crosses `entry`, the library's file, `gpu.fast_path`, `gpu.programs` where an input has moved,
`cuda.graph_executor`, and `fast_path` or `outputs` for what it gives.  What few bundles have is imported when it
is used: `structure`, `pieces`, `aliasing`, `mutated_inputs`, `records`, `warmup`, `profile`.
"""
