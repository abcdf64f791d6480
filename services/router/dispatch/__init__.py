"""From a request to a verifier and back: routing, retries, streams."""
