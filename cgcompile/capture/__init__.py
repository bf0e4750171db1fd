"""The capture recorder: a GPU that is here runs the model, and its captured graphs become recordings.  README.md is the map."""
