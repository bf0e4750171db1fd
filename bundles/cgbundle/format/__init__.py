"""The bundle on disk: manifest records, their JSON, files and hashes, safetensors, sizes, pytrees. `validate/` has the checks."""
