"""Small modules that keep attributes from call to call, drawn at random, and sequences of calls: bundles beside eager PyTorch."""
