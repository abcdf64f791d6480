"""What the verifier tells of its requests, its engine and its drafters."""
