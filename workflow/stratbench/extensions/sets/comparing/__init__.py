"""Two result sets beside each other: matched cells, ratios, figures and the page."""
