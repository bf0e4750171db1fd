"""The capture recorder: captures CUDA graphs of the model on a local GPU, and makes recordings of them.  README.md describes it."""
