"""The policies of a parameter server: what it does with each push."""
