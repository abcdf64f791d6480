"""gRPC between services: channels, servers, messages and their conversion."""
