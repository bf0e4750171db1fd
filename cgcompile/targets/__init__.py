"""Build targets and the recorders that build for them.  Subfolders: the cpu target, and code that both recorders of CUDA share."""
