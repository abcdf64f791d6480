"""EAGLE heads in every layout that they are published in: a folder in, a head or what runs beside the target out."""

from eyas.models.heads.eagle.head import EagleHead
from eyas.models.heads.eagle.load import load_fuser, load_head

__all__ = ["EagleHead", "load_fuser", "load_head"]
