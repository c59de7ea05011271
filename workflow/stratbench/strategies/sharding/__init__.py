"""Strategies that shard parameters, gradients or the optimizer's state."""
