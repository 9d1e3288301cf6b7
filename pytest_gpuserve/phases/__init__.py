"""How far is it? Phases of every rank, read from an engine's log while it grows."""
