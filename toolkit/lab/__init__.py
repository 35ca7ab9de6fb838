"""Recorded routing traces, replayed against every planner."""
