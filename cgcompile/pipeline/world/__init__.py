"""A model over several devices: a process builds each rank, and what they made becomes one bundle."""
