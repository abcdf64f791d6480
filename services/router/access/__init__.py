"""Who may come in: API keys of both doors, and what the gRPC door is encrypted with."""
