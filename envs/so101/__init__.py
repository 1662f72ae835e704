"""An SO-101 arm that carries a cube to a place on the table."""
