"""The parameter server: shards of the weights, policies that update them, and the workers' channel."""
