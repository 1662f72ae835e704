"""Side-by-side benchmarks; every one prints rows and can write them as JSON."""
