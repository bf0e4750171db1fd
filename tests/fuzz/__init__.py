"""The mutation fuzzer: bundles that were changed at random, hashes redone, must be refused or answer rightly.

python -m tests.fuzz --minutes 20 --jobs 2
"""
