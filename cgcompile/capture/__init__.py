"""The capture recorder: a GPU that is here runs the model, and its captured graphs become recordings.
The parent compares what two worker processes saw; README.md is the map.
"""
