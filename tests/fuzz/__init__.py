"""The mutation fuzzer: randomly changed bundles, with correct hashes, must be refused or give right answers.

python -m tests.fuzz --minutes 20 --jobs 2
"""
