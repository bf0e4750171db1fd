"""One file per command of `cgcompile`: its options, the call of the library, and its output as text and JSON."""
