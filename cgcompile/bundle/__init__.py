"""The only writer of the format: program, self-test and manifest of a bundle, and the proof in a fresh process."""
