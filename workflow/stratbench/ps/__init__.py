"""The parameter server: shards of the weights, the policies that update them, and how workers reach them."""
