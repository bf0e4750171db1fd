"""Programs that run for minutes to hours. They count failures and answers of the wrong bundle, and measure growing resources."""
