"""The HTTP API of the router: OpenAI's endpoints, health and metrics."""
