"""Text-to-image policies: Stable Diffusion 1.x/2.x and Stable Diffusion 3."""

from modalities.image.config import ImagePolicyConfig

__all__ = ["ImagePolicyConfig"]
