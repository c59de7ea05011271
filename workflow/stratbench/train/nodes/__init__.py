"""Code for cells on several nodes: starts, network interfaces, rendezvous of workers, and pauses."""
