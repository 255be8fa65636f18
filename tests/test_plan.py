"""`python -m launch plan`: what it says of a recipe that fits, one that does not, and one it cannot compile."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxrl_post.config import Config
from jaxrl_post.config_offline import OfflineConfig
from jaxrl_post.loops import offline_planning
from jaxrl_post.loops import planning as online_planning
from jaxrl_post.loops.planned import Item, Plan, ProgramPlan
from jaxrl_post.loops.planned_rollout import planned_rollout
from launch import plan as planning
from sharding import targets
from sharding.report import count_flops

ROOT = Path(__file__).parent.parent
MODEL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16}
FITS, DOES_NOT_FIT = 0, 1


def offline(kind, model=MODEL, **mesh):
    return OfflineConfig.model_validate(
        {
            "model": {"random": model, "scan_layers": True},
            "mesh": mesh,
            "data": {"path": "not_there.jsonl", "examples_per_step": 4, "max_tokens": 32},
            "algorithm": {"kind": kind},
            "training": {"tokens_per_microbatch": 64},
        }
    )


def ppo(**critic):
    return Config.model_validate(
        {
            "model": {"random": MODEL, "scan_layers": True},
            "data": {"prompts_per_step": 2, "max_prompt_tokens": 16},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8},
            "algorithm": {"kind": "ppo", "epochs": 2, "mini_batches": 2, "critic": critic},
            "training": {"tokens_per_microbatch": 64},
        }
    )


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Targets are as many CPU devices: their programs compile in a second."""
    monkeypatch.setattr(planning, "open_target", lambda target: jax.devices()[: target.sizes[0] * target.sizes[1]])


def test_a_recipe_from_files_that_fits(capsys):
    """Weights and two moments in float32; every other part is told and they add up."""
    assert planning.plan(offline("sft"), ["h200:1x1"], as_json=True, sweep=False) == FITS
    (report,) = json.loads(capsys.readouterr().out)
    (update,) = report["programs"]
    assert (report["target"], report["mesh"], report["fits"], report["advice"]) == ("h200:1x1", {}, True, [])
    assert update["items"]["parameters"] == 4 * report["parameters"]
    assert update["items"]["optimizer"] == pytest.approx(2 * update["items"]["parameters"], abs=64)
    assert update["peak"] == sum(update["items"].values())
    assert update["flops"] > 0


def test_a_rollout_that_graders_hear_of_early_is_planned_in_its_parts():
    """64 requests on a target whose slots are packed once: two programs and no other. Together they multiply what the
    one program of a function that sees all of a step does, and the first is handed the cache that this one makes."""
    raw = ppo().model_dump() | {"algorithm": {"kind": "grpo"}}
    raw["data"] |= {"prompts_per_step": 16}
    raw["rollout"] |= {"samples_per_prompt": 4}
    target, found = targets.parse_target("h200:1x1"), []
    for per in ("sample", "step"):
        graded = raw | {"reward": {"kind": "function", "function": "json:loads", "per": per}}
        job = online_planning.stand_in_job(Config.model_validate(graded), jax.devices()[:1])
        found.append(planned_rollout(job, target, {}, {})[0])
    early, whole = found
    assert [one.name for one in early] == ["rollout, 64 slots", "rollout, 32 slots"]
    assert [one.name for one in whole] == ["rollout"]
    flops = lambda programs: sum(count_flops(one.traced.jaxpr, one.trips) for one in programs)
    assert flops(early) == flops(whole) > 0
    assert early[0].made == whole[0].made
    assert early[1].made["cache"] == early[0].made["cache"]  # as it is before it is packed


def shrink(monkeypatch):
    """An H200 of 200 kB."""
    small = dataclasses.replace(targets.CHIPS["h200"], memory=200_000)
    monkeypatch.setattr(targets, "CHIPS", dict(targets.CHIPS) | {"h200": small})


def test_one_that_does_not_fit_is_told_what_to_change(capsys, monkeypatch):
    shrink(monkeypatch)
    assert planning.plan(offline("sft"), ["h200:1x1"], as_json=False, sweep=False) == DOES_NOT_FIT
    report = capsys.readouterr().out
    assert "DOES NOT FIT" in report
    assert "update, activations and other temporaries" in report
    assert "training.tokens_per_microbatch" in report


@pytest.mark.slow
def test_a_sweep_ranks_the_meshes_there_are_with_experts_among_them(capsys, monkeypatch):
    shrink(monkeypatch)
    experts = MODEL | {"family": "qwen3_moe", "experts": {"count": 4, "per_token": 2, "size": 32}}
    assert planning.plan(offline("sft", experts), ["h200:1x2"], as_json=False, sweep=True) == DOES_NOT_FIT
    ranked = capsys.readouterr().out.partition("meshes, the best first\n")[2].splitlines()
    assert {line.split()[0] for line in ranked} == {"fsdp=2", "expert=2", "tensor=2"}
    assert all("does not fit" in line for line in ranked)


def test_a_sweep_says_in_a_line_why_it_leaves_a_mesh_out(capsys, monkeypatch):
    items = (Item("parameters", 3 * 2**30),)
    fits = Plan(targets.parse_target("h200:1x2"), {"fsdp": 2}, 7, "", (ProgramPlan("update", 1, items),))

    class Stub:
        def __init__(self, config, target, devices):
            if config.mesh.tensor > 1:
                raise ValueError("three heads\n  do not divide")

        def without_room(self):
            return None

        def plan(self):
            return fits

    monkeypatch.setattr(planning, "planner", Stub)
    assert planning.plan(offline("sft"), ["h200:1x2"], as_json=False, sweep=True) == FITS
    told = capsys.readouterr()
    ranked = told.out.partition("meshes, the best first\n")[2].splitlines()
    assert [" ".join(line.split()) for line in ranked[1:]] == ["tensor=2 refused three heads do not divide"]
    assert told.err.splitlines() == [
        "mesh 1 of 2, fsdp=2: fits, 3.00 GiB, 0.0 s a step; 0s so far, about 0s to go",
        "mesh 2 of 2, tensor=2: three heads do not divide; 0s so far, about 0s to go",
    ]
    planning.plan(offline("sft"), ["h200:1x2"], as_json=True, sweep=True)
    assert json.loads(capsys.readouterr().out)[1] == {
        "target": "h200:1x2", "mesh": {"tensor": 2}, "refused": "three heads do not divide",
    }  # fmt: skip
    monkeypatch.setattr(planning, "factorizations", lambda *_: [{"fsdp": 1, "tensor": 2}])
    with pytest.raises(ValueError, match="no mesh of h200:1x2 takes the model: tensor=2: three heads do not divide"):
        planning.plan(offline("sft"), ["h200:1x2"], as_json=False, sweep=True)


@pytest.mark.parametrize("config", [offline("sft"), ppo()], ids=["files", "ppo"])
def test_a_sweep_compiles_nothing_that_weights_alone_leave_no_room_for(config, capsys, monkeypatch):
    """An H200 of 100 kB; two devices share weights of 0.1 MB, their moments and gradients."""
    small = dataclasses.replace(targets.CHIPS["h200"], memory=100_000)
    monkeypatch.setattr(targets, "CHIPS", dict(targets.CHIPS) | {"h200": small})
    for module in (offline_planning, online_planning):
        monkeypatch.setattr(module, "compile_planned", None)
    assert planning.plan(config, ["h200:1x2"], as_json=True, sweep=True) == DOES_NOT_FIT
    told = capsys.readouterr()
    assert [one["mesh"] for one in json.loads(told.out)] == [{"fsdp": 2}, {"tensor": 2}]
    for line in told.err.splitlines():
        assert ": does not fit: " in line
        assert "optimizer, " in line
        assert " alone take " in line
        assert "of 89.84 KiB a device" in line


def test_no_time_is_told_of_a_program_that_found_no_room():
    """Nor is anything known of its memory."""
    refused = ProgramPlan("update", 1, refused="Ran out of memory on HBM")
    one = Plan(targets.parse_target("v5e:2x2"), {"fsdp": 4}, 7, "", (refused,))
    report = planning.describe(one)
    assert "update: no room: Ran out of memory on HBM" in report
    assert "estimate" not in report
    assert "  update: more devices" in report
    assert "no room" in planning.ranking([one])
    assert planning.as_dict(one)["step_seconds_estimate"] is None


def test_a_tiny_model_is_told_in_units_of_its_size():
    items = (Item("parameters", 400_000), Item("cache", 41 * 2**20), Item("optimizer", 3 * 2**30))
    one = Plan(targets.parse_target("h200:1x1"), {}, 100_000, "", (ProgramPlan("update", 1, items),))
    report = [" ".join(line.split()) for line in planning.describe(one).splitlines()]
    assert report[0] == "h200:1x1: 0.10M parameters on one device"
    assert {"parameters 0.38 MiB", "cache 41.00 MiB", "optimizer 3.00 GiB", "in all 3.04 GiB 2%"} <= set(report)


def test_a_mesh_of_other_size_is_refused_by_what_to_set():
    with pytest.raises(ValueError, match="mesh fsdp=3, have 2 devices: make the product 2"):
        planning.plan(offline("sft", fsdp=3), ["h200:1x2"], as_json=False, sweep=False)


def test_teachers_are_refused_by_name():
    taught = {"kind": "sft_distillation", "teachers": {"one": {"path": "teacher"}}}
    config = offline("sft").model_dump() | {"algorithm": taught}
    with pytest.raises(ValueError, match=r"algorithm\.kind=sft_distillation has teachers, which cannot be planned yet"):
        planning.plan(OfflineConfig.model_validate(config), ["h200:1x1"], as_json=False, sweep=False)


def test_a_compiler_that_is_not_installed_is_named_by_its_extra(monkeypatch):
    monkeypatch.setattr(targets, "EXTRAS", {"tpu": ("no_such_module", "plan-tpu"), "gpu": ("no.such", "plan-gpu")})
    for target, extra in {"v5e:2x2": "plan-tpu", "h100:1x1": "plan-gpu"}.items():
        with pytest.raises(ValueError, match=extra):
            targets.open_target(targets.parse_target(target))


def test_the_meshes_of_a_sweep():
    sizes = lambda *of: [tuple(mesh[axis] for axis in ("data", "fsdp", "expert", "tensor")) for mesh in of]
    assert sizes(*planning.factorizations(2, 2)) == [(1, 2, 1, 1), (1, 1, 1, 2)]
    assert sizes(*planning.factorizations(4, 2)) == [(1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2)]
    assert (1, 4, 8, 4) in sizes(*planning.factorizations(128, 8, experts=128))
    assert {mesh["expert"] for mesh in planning.factorizations(8, 8, experts=12)} == {1, 4}


def test_without_devices_no_plugin_of_jax_complains():
    """On a machine with plugins for planning alone; where there is a GPU or TPU it must be used as before."""
    script = (
        "import sys, launch.__main__ as cli\ncli.main(['no-such-recipe'])\nimport jax\nprint(jax.default_backend())"
    )
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no-such-recipe")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_other_recipes_from_files(kind, capsys):
    assert planning.plan(offline(kind), ["h200:1x1"], as_json=True, sweep=False) == FITS
    (update,) = json.loads(capsys.readouterr().out)[0]["programs"]
    assert ("reference policy" in update["items"]) == (kind != "reward_model")


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["own", "shared"])
def test_a_critic_has_an_update_of_its_own_beside_the_policy(decoder, capsys):
    assert planning.plan(ppo(decoder=decoder), ["h200:1x1"], as_json=True, sweep=False) == FITS
    rollout, update, critic = json.loads(capsys.readouterr().out)[0]["programs"]
    assert [one["name"] for one in (rollout, update, critic)] == ["rollout", "update", "critic's update"]
    assert update["runs"] == critic["runs"] == 4
    assert critic["items"]["policy"] == update["items"]["parameters"]
    assert critic["items"]["policy's optimizer"] == update["items"]["optimizer"]
    own = critic["items"]["parameters"]
    head = 4 * MODEL["hidden_size"]
    assert own == head + (update["items"]["parameters"] if decoder == "own" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x1", "tpu7x:2x2x1"])
def test_real_compilers_take_a_recipe_from_files(target):
    words = ["configs/tiny/sft.yaml", "--target", target, "--json", "mesh.fsdp=-1", "model.scan_layers=true"]
    command = [sys.executable, "-m", "launch", "plan", *words]
    environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert json.loads(done.stdout)[0]["fits"]
