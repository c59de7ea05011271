"""Queues and workers on a virtual clock."""
