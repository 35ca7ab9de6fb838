"""Replay of recorded routing traces with every planner."""
