"""Where arrays live: the mesh, the rules from logical to mesh axes, and placement. Knows no model."""

from sharding.mesh import AXES, BATCH_AXES, batch_shards, make_mesh, resolve_sizes
from sharding.placement import BytesReport, LeafBytes, bytes_per_device, place, reshard, tree_shardings
from sharding.rules import ROLLOUT, TRAIN, Rules, partition_spec

__all__ = [
    "AXES",
    "BATCH_AXES",
    "ROLLOUT",
    "TRAIN",
    "BytesReport",
    "LeafBytes",
    "Rules",
    "batch_shards",
    "bytes_per_device",
    "make_mesh",
    "partition_spec",
    "place",
    "reshard",
    "resolve_sizes",
    "tree_shardings",
]
