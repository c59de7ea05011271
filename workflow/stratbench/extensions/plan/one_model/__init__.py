"""Plan of a single model, for `stratbench plan --model` and `stratbench.estimate`."""
