"""Who is alive, however it is found: leases in a registry, a fixed list, or the endpoints that Kubernetes names."""
