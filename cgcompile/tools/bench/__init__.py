"""bench: compares a bundle with eager PyTorch, torch.compile, CUDA graphs and ONNX Runtime: start, calls, memory, and outputs."""
