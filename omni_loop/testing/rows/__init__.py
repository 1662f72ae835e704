"""The rows of the reliability board that are built: each a function of a seed that returns its number or raises."""
