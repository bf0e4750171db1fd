"""What restricts the tokens of an answer: grammars, biases, penalties by count; and calls of tools, which grammars write."""
