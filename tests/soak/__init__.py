"""Programs that run for minutes to hours: they count failures, mixed-up answers and growth."""
