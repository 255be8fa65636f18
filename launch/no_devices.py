"""What a process that compiles for hardware it lacks must have in its environment before jax is imported."""

import os

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "GRPC_VERBOSITY": "ERROR",
}


def look_for_none() -> None:
    """No plugin of jax asks for devices; only then are compilers for GPUs and TPUs there without them."""
    os.environ.update(ENVIRONMENT)
