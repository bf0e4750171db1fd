"""Language models: continuous batching over pages of a cache, text and tokens, OpenAI's completions."""
