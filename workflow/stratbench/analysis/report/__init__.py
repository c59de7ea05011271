"""The report and the page for exploring: their content and templates."""
