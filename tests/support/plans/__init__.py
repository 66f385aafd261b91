"""Plans made at random, and an independent judge of them."""
