"""Run as `python compile_updates.py TARGET RECIPE…`: compiles the updates of recipes for hardware that is not there.

Prints a line of JSON for each: seconds, or the reason why it is refused.
"""

import json
import sys
import time

from launch.no_devices import look_for_none

look_for_none()

from jaxrl_post.loops.learner import Learner  # noqa: E402
from jaxrl_post.loops.planning import stand_in_job  # noqa: E402
from jaxrl_post.recipes import load  # noqa: E402
from sharding.targets import open_target, parse_target  # noqa: E402

target = parse_target(sys.argv[1])
devices = open_target(target)[:1]
for recipe in sys.argv[2:]:
    begun = time.monotonic()
    config = load(recipe)
    learner = Learner(stand_in_job(config, devices))
    learner.traced_update().lower().compile(compiler_options=target.compiler_options)
    print(json.dumps({"recipe": recipe, "seconds": time.monotonic() - begun}), flush=True)
