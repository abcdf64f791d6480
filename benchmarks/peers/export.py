"""Writes a checkpoint in OpenVINO's form: `python export.py FOLDER TARGET BITS`, with optimum-intel."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Export weights of 32 or 8 bits, with the tokenizer."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    source, target, bits = arguments
    config = OVConfig(dtype="fp32")
    if bits == "8":
        config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8))
    main_export(source, target, task="text-generation-with-past", ov_config=config)


if __name__ == "__main__":
    main(sys.argv[1:])
