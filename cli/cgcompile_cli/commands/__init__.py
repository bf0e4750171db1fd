"""One file per command of `cgcompile`: its options, the call of the library behind it, text and JSON of what came back."""
