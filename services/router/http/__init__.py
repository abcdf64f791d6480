"""The router's HTTP door: OpenAI's API over the same front as gRPC."""
