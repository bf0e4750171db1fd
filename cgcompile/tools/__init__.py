"""Commands beside the build: benchmarks, differences of two bundles, capture sizes for a request log.
They use bundles; no stage uses them.
"""
