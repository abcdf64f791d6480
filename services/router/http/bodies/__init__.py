"""Bodies of requests: OpenAI's, Responses, Anthropic's, and names that other servers use."""
