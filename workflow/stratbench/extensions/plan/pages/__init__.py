"""Output of the plan and the check for users: rows, quantities, texts and the page."""
