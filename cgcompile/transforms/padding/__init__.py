"""Proves operator by operator whether a call may be padded or chunked."""
