"""Networks: the models, a user's own, precision, checkpointing and how they are sharded."""
