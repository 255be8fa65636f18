"""What a process without devices must have in its environment before jax is imported."""

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is there to be shared, and compilers may work side by side
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "ERROR",
}
# In /dev: NVIDIA's (the last is Windows' for Linux), AMD's and TPUs'.
DEVICE_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd", "accel*", "vfio")


def look_for_none() -> None:
    """No plugin of jax asks for devices; only then are compilers for GPUs and TPUs there without them."""
    os.environ.update(ENVIRONMENT)


def skip_absent_devices() -> None:
    """On Linux without a GPU or TPU jax uses the CPU at once: plugins that are there for `plan` alone would complain
    that they find no device. `JAX_PLATFORMS` given by the user stands."""
    if sys.platform == "linux" and not any(any(Path("/dev").glob(pattern)) for pattern in DEVICE_FILES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
