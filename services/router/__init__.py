"""The router: clients send it text over gRPC or HTTP; it runs each request on a verifier and a drafter."""
