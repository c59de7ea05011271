"""What a cell will hold and send: traced on fake tensors, in processes of its own, and cached."""
