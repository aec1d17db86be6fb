"""Write a small quantized checkpoint for a test: `infer quantize`, from a checkout.

python scripts/quantize.py /tmp/tiny-llama /tmp/tiny-gptq --scheme gptq --group-size 32
"""

from __future__ import annotations

import sys

from infer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["quantize", *sys.argv[1:]]))
