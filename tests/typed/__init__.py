"""Scripts as users write them: `make check` holds them to what `mypy --strict` asks; nothing runs them."""
