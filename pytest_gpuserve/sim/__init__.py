"""The embedded engine: real processes, real blocking calls, real HTTP, injectable faults; no GPU, no torch."""
