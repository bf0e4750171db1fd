"""Language models: continuous batching with a paged cache, tokenizers, OpenAI's completions."""
