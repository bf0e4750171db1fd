"""What every stage uses and no stage owns.  Imports nothing else of cgcompile but its errors."""
