"""Serves bundles over HTTP: OpenAI's protocol for language models, the Open Inference Protocol for all other bundles.

`cgcompile serve` starts it.  It imports cgbundle and the libraries of the extra `serve`, never torch or the compiler.
"""
