"""Code that benchmarks and tests share. It imports neither of them."""
