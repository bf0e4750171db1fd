"""Programs that run for minutes to hours. They count failures, answers of another bundle, and growing resources."""
