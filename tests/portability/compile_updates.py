"""Run as `python compile_updates.py TARGET RECIPE[,KEY=VALUE…]…`: compiles updates for hardware that need not be there.

TARGET is one of `launch plan`, or cpu.
Prints a line of JSON for each: seconds, how packed rows attend, and the kernels in the program.
"""

import json
import sys
import time

from launch.no_devices import look_for_none

look_for_none()

import jax  # noqa: E402

from jaxrl_post.config_offline import OfflineConfig  # noqa: E402
from jaxrl_post.loops import offline_planning, planning  # noqa: E402
from jaxrl_post.loops.learner import Learner  # noqa: E402
from jaxrl_post.loops.offline_learner import OfflineLearner  # noqa: E402
from jaxrl_post.recipes import load  # noqa: E402
from sharding.report import Program  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

if sys.argv[1] == "cpu":
    devices, options = jax.devices("cpu")[:1], {}
else:
    target = parse_target(sys.argv[1])
    devices, options = open_target(target)[:1], target.compiler_options
for asked in sys.argv[2:]:
    begun = time.monotonic()
    recipe, *overrides = asked.split(",")
    config = load(recipe, overrides)
    if isinstance(config, OfflineConfig):
        learner = OfflineLearner(job := offline_planning.stand_in_job(config, devices))
    else:
        learner = Learner(job := planning.stand_in_job(config, devices))
    compiled = learner.traced_update().lower().compile(compiler_options=options)
    line = {
        "recipe": asked,
        "seconds": time.monotonic() - begun,
        "attention": job.network.model.attention,
        "kernels": Program(compiled.as_text()).kernels(),
    }
    print(json.dumps(line), flush=True)
