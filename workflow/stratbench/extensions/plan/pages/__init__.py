"""The plan and the check as people read them: rows, quantities, texts and the page."""
