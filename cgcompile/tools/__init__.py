"""What the commands bench, diff, sizes, doctor, operators, push and pull do.  No stage of a build imports these modules."""
