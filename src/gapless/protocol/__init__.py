"""The core: sans-I/O, no clock, no randomness; inputs in, effects out."""
