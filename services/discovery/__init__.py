"""Finds the live workers: by leases in Redis, by a fixed list, or by Kubernetes EndpointSlices."""
