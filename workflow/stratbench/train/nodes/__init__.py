"""Start of a program on each of several nodes, and the rendezvous of their workers."""
