"""Reward functions and reward models over text, image, video and audio, and their weighted composition."""

OWNER = "uniml-rl"
"""Read by `import uniml_rl`, which must not mistake an unrelated distribution of this name for its own package."""
