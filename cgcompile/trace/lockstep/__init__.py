"""Triton kernels on the CPU, many program instances at a time.

Triton's own interpreter runs one program instance after another, which takes minutes where a GPU has thousands of them.  Here its
front end is kept (kernels run as Python, `tl` checks types and promotes), but what answers it is ours: an array has the instances
of a batch as its first axis, so that one NumPy call serves all of them (`builder`).  When a branch or a loop bound differs between
instances, the batch is undone and run again in groups that agree (`launch`).  Every access is checked against the memories
(`memory`), and what no instance loads or stores holds poison.
"""
