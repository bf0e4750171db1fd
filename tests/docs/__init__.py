"""Documentation tools: they write the reference from the code, check links, and run the code blocks of pages."""
