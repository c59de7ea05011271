"""Policies of parameter servers: how a server updates the weights with pushed gradients."""
