"""From tokens to meaning: tokenizers, chat templates, tool calls, reasoning, JSON schemas."""
