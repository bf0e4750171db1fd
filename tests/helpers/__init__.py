"""What tests share: fabricated bundles, models, a fake driver, places."""
