"""From a call to its results: guards, dispatch, plan, written inputs, shared outputs, views.
Pure but for the tensors that it moves.
"""
