"""bench: compares a bundle with other ways to serve the same model: cold start, time of a call, memory, and the outputs."""
