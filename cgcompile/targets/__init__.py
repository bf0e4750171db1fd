"""What can be built for and by which recorder; below, the cpu target and what both recorders of a cuda target share."""
