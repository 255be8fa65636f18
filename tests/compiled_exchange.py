"""Run as `python compiled_exchange.py TARGET`: compiles an update with exchanged tokens for hardware that is not there.

Prints JSON: how tokens come to experts, rows of a micro-batch and their length, and how often what kind of message of
how many bytes is sent over `expert`.
"""

import collections
import json
import sys

from launch.no_devices import look_for_none

look_for_none()

from jaxrl_post.loops.learner import Learner  # noqa: E402
from jaxrl_post.loops.planning import stand_in_job  # noqa: E402
from jaxrl_post.recipes import load  # noqa: E402
from sharding.report import Program  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

RECIPE = [
    "mesh.fsdp=1", "mesh.expert=8", "model.moe.dispatch=all_to_all", "model.moe.aux_loss_coef=0", "model.remat=full",
    "model.random.hidden_size=256", "training.row_length=64", "training.tokens_per_microbatch=64",
    "data.max_prompt_tokens=32",
]  # fmt: skip

target = parse_target(sys.argv[1])
job = stand_in_job(load("configs/tiny/moe_grpo.yaml", RECIPE), open_target(target))
learner = Learner(job)
compiled = learner.traced_update().lower().compile(compiler_options=target.compiler_options)
sent = collections.defaultdict(collections.Counter)
for c in Program(compiled.as_text(), [1]).each_collective(job.network.mesh):
    if c.axes == ("expert",):
        sent[c.kind][c.bytes // c.count] += c.count
shape = learner.shape
print(json.dumps({"dispatch": job.network.model.moe.dispatch, "shape": [shape.rows, shape.length], "sent": sent}))
