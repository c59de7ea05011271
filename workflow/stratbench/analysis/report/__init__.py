"""Content and templates of the report, and of the page on which readers explore the results."""
