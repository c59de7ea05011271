"""The verdict: which strategy is fastest, at a tenth of the matrix's cost, from short paired blocks."""
