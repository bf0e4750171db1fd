"""Commands that use bundles: benchmarks, differences of two bundles, capture sizes for a request log.  No stage uses them."""
