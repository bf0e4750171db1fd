"""Support for models that differ from layers with paged attention: caches by lane, states, the text part of multimodal models, and
LoRA adapters."""
