"""One network alone: what `plan --model` and `estimate` say of it."""
