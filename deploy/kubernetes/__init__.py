"""The same locked system for Kubernetes: manifests from deploy.toml and deploy.lock, and what a cluster lacks."""
