"""Plots that several recipes draw."""
