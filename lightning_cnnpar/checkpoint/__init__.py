"""Between the names and indices of one process and the parts that each rank holds."""
