"""Policies: adapters that let one trainer see text, diffusion and codec-token models as the same thing."""

import logging

OWNER = "uniml-rl"
"""Read by `import uniml_rl`, which must not mistake an unrelated distribution of this name for its own package."""

# diffusers imports DeepSpeed wherever it is installed, and that says on the standard output that it found no GPU.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
