"""Restrictions of an answer's tokens: grammars, biases, penalties for repeated tokens; and tool calls, which grammars describe."""
