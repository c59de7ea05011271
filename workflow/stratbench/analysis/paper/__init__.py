"""A study beside the paper's published figures: claims, deviations, and an audit of the paper's tables."""
