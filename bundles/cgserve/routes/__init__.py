"""The protocols over HTTP."""
