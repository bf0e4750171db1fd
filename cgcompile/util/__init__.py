"""What every stage uses and no stage owns: tolerances, bytes of tensors, worker processes, the content cache, progress.
Imports nothing else of cgcompile but its errors.
"""
