"""RL post-training of language models: one decoder, one mesh, sampling and updates in one SPMD job."""

__version__ = "0.1.0"
