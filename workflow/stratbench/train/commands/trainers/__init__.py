"""Trainers with loops of their own, which the study `engines` starts as commands: on the network, samples and
initial weights of the strategies beside them, so that they do the same work."""
