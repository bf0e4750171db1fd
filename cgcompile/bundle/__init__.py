"""The only writer of the format: program, exam and manifest of a bundle, and the proof in a fresh process."""
