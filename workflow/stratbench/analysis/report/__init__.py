"""The report and the page for exploring: what is said where, and their templates."""
