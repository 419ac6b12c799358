"""Policies: adapters that let one trainer see text, diffusion and codec-token models as the same thing."""

OWNER = "uniml-rl"
"""Read by `import uniml_rl`, which must not mistake an unrelated distribution of this name for its own package."""
