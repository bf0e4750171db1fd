"""The stages of a build, and the compatibility report, which shares the first stages."""
