"""Starts a program on each of several nodes, and connects the workers by a rendezvous."""
