"""Sessions of a cuda bundle on a GPU. A call goes through `backend`, `programs` and `cuda.graph_executor`, or `fast_path`."""
