"""Restrictions of an answer's tokens: grammars, biases, penalties by count; and tool calls, which grammars describe."""
