"""bench: a bundle beside other ways to serve the same model: cold start, time of a call, memory, and whether the outputs agree.
Nothing here is imported by a build or by serving; `measure` starts a worker per measurement and computes nothing itself.
"""
