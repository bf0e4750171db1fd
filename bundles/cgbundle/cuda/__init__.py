"""The CUDA driver alone: context, memory, uploads, kernels and their parameters, runnable recordings (`graph_executor`)."""
