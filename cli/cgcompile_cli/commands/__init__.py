"""One file per command of `cgcompile`: its options, and the call of the library behind it.
Text and JSON of what came back.
"""
