"""What the servers are made of: queues that let requests go together, limits of HTTP, the Open Inference Protocol, versions."""
