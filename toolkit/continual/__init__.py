"""Learning one task after another: what is remembered, what is measured."""

from toolkit.continual.memory import Remember, Replay, ReplayMemory

__all__ = ["Remember", "Replay", "ReplayMemory"]
