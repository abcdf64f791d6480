"""The services inside Ray Serve: its replicas host them, its controller says how many there are of each."""
