"""The services as one Ray Serve application: replicas run them, policies scale them."""
