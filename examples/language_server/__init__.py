"""What serve_llm.py is made of: scheduler, engine, text, OpenAI's protocol, its answers over HTTP.  Without torch and NumPy."""
