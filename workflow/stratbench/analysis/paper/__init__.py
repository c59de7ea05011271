"""A study beside the paper's published figures: claims, deviations, and its tables in the form of records."""
