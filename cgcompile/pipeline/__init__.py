"""The stages in order: a build, and the compatibility report that shares its first stages."""
