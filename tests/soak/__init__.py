"""Programs that run for minutes to hours and count: nothing may fail, nothing may be mixed up, nothing may grow."""
