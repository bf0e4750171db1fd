"""Build targets and their recorders.  `cpu` is the cpu target, `cuda` the code that both recorders for GPUs share.  `kernels` and
`collectives` have code that cgcompile adds to bundles."""
