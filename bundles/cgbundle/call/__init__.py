"""A call, file by file. `entry`: `Entry.__call__` takes the arguments (`structure` if they are nested), and pads inputs with zeros.
`plan`: guards compare the inputs with the signature; then it chooses recorded sizes, and lists replays with slices of inputs and
outputs. `outputs`: runs a program of the backend (`gpu.backend` or `cpu.backend`) and returns outputs as the caller's tensors;
calls with a known layout take its fast path. `locks`: turns of a session. `tensors.library`: the caller's tensor library. Few
bundles use `structure`, `aliasing`, `warmup`, `profile`, `update` (new weights): they are imported on use."""
