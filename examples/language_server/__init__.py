"""What serve_llm.py is made of: scheduler, engine, text, OpenAI's protocol.  Without torch and NumPy."""
