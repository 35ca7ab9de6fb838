"""Activity recognition from motion sensors."""
