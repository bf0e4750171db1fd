"""What a call of the user's model does to Python while torch.export traces it, and what its code is told meanwhile: attributes that it
changes (`attributes`), conversions that change nothing (`conversions`), and whether it is traced at all (`questions`)."""
