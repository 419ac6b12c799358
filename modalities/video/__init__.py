"""Text-to-video policies: the Wan family."""

from modalities.video.config import VideoPolicyConfig

__all__ = ["VideoPolicyConfig"]
