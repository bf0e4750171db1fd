"""What tests share: models, bundles made by hand, fake drivers; places, errors, imports."""
