"""bench: a bundle beside other ways to serve the same model: cold start, time of a call, memory, and whether the outputs agree."""
