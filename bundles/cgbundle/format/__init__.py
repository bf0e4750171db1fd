"""The bundle on disk: manifest rows, their JSON, files and hashes, safetensors, size expressions, pytrees.
Reads and writes; what must hold is checked in validate/.
"""
