"""Run as `python compile_updates.py TARGET RECIPE[,KEY=VALUE…]…`: compiles updates for hardware that is not there.

Prints a line of JSON for each: seconds, how packed rows attend, and the kernels in the program.
"""

import json
import sys
import time

from launch.no_devices import look_for_none

look_for_none()

from jaxrl_post.loops.learner import Learner  # noqa: E402
from jaxrl_post.loops.planning import stand_in_job  # noqa: E402
from jaxrl_post.recipes import load  # noqa: E402
from sharding.report import Program  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

target = parse_target(sys.argv[1])
devices = open_target(target)[:1]
for asked in sys.argv[2:]:
    begun = time.monotonic()
    recipe, *overrides = asked.split(",")
    learner = Learner(job := stand_in_job(load(recipe, overrides), devices))
    compiled = learner.traced_update().lower().compile(compiler_options=target.compiler_options)
    line = {
        "recipe": asked,
        "seconds": time.monotonic() - begun,
        "attention": job.network.model.attention,
        "kernels": Program(compiled.as_text()).kernels(),
    }
    print(json.dumps(line), flush=True)
