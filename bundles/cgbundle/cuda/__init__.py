"""The CUDA driver alone: context, memory, kernels, their parameters (`launches`), runnable recordings (`graph_executor`)."""
