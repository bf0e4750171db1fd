"""The protocols over HTTP and gRPC."""
