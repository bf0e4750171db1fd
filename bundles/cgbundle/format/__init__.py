"""The bundle on disk: manifest, its JSON, files and hashes, safetensors, shapes, pytrees, tables. `validate/` has the checks."""
