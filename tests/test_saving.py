"""When a run saves: hand-made clocks and metrics."""

import contextlib

import pytest

from jaxrl_post import recipes
from jaxrl_post.checkpoint import Checkpointer
from jaxrl_post.config_checkpoint import Checkpoint
from jaxrl_post.loops.metric_names import Names
from jaxrl_post.loops.online import run
from jaxrl_post.loops.saving import Saves


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def saves():
    """Makes a `Saves` of 100 steps on a clock of its own."""

    def make(evaluates=True, **keys):
        clock = Clock()
        return Saves(Checkpoint(**keys), 100, evaluates, clock=clock), clock

    return make


def test_minutes_count_from_the_last_save(saves):
    decides, clock = saves(every_minutes=2.0, every=40)
    due = []
    for step in range(1, 13):  # 50 s each
        clock.now += 50
        if decides.due(step, {}):
            due.append(step)
            decides.saved()
    assert due == [3, 6, 9, 12]
    assert decides.due(40, {})
    assert decides.due(100, {})


@pytest.mark.parametrize(
    ("before", "seconds"), [("00:10:00", 600), (600, 600), ("01:00:01", 3601), ("100:00:00", 360_000)]
)
def test_a_run_ends_while_twice_its_longest_step_still_fits(saves, before, seconds):
    """After a first step of 100 s, which compiles, all take 10 s but one of 30 s."""
    decides, clock = saves(before=before)
    clock.now = 100
    steps = [decides.out_of_time()]
    while not steps[-1]:
        clock.now += 30 if len(steps) == 3 else 10
        steps.append(decides.out_of_time())
    assert seconds - 60 < clock.now <= seconds - 50


def test_the_best_step_is_saved_when_it_comes_and_the_record_survives(saves):
    best = {"metric": "val-core/x", "mode": "max"}
    decides, _ = saves(keep_best=best, every=100)
    values = {1: 0.5, 2: None, 3: 0.4, 4: 0.5, 5: 0.75, 6: float("nan"), 7: float("inf")}
    metrics = lambda value: {"loss": 1.0} | ({} if value is None else {"val-core/x": value})
    due = [step for step, value in values.items() if decides.due(step, metrics(value))]
    assert (due, decides.best_step) == ([1, 5], 5)
    again, _ = saves(keep_best=best, every=100)
    again.restore({"other": 1, **decides.state()})
    assert not again.due(8, metrics(0.75))
    assert again.due(9, metrics(0.76))
    other, _ = saves(keep_best={"metric": "loss", "mode": "min"}, every=100)
    other.restore(decides.state())
    assert other.best_step is None
    assert [step for step, loss in enumerate([3.0, 2.0, 2.5, 1.0]) if other.due(step, {"loss": loss})] == [0, 1, 3]


def test_a_best_of_evaluations_needs_some(saves):
    with pytest.raises(ValueError, match=r"keep_best\.metric=val-core/x comes from evaluations and the run makes none"):
        saves(evaluates=False, keep_best={"metric": "val-core/x"})


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("critic/score", "one of critic/score/"),
        ("critic/vf_loss", "one of critic/"),  # of PPO alone
        ("val-core/arithmetic/acc", "one of val-core/arithmetic_add/acc/mean@1, "),
        ("accuracy", "actor/…, "),
        ("timing_s/gen", "when a step is saved"),
        ("reward/failed", "when a step is saved; name one of critic/rewards/"),
    ],
)
def test_a_metric_that_no_step_has_is_refused_before_the_first(metric, near, tmp_path):
    with pytest.raises(ValueError, match=rf"keep_best\.metric={metric}: no such metric in this run.*{near}"):
        run(recipes.load("configs/tiny/grpo.yaml", [
            f"run_dir={tmp_path / 'run'}", "checkpoint.keep_best={metric: " + metric + "}", "mesh.fsdp=1",
            "mesh.allow_unused_devices=true", "data.task.high=3",
        ]))  # fmt: skip
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("metric", ["actor/entropy", "training/filter_groups/batches", "critic/score/mean"])
def test_names_that_only_a_run_can_tell_are_let_through(metric, saves):
    names = Names(frozenset({"critic/score/mean"}), frozenset({"actor", "training"}))
    assert names.may_have(metric)
    assert Names().may_have(metric)
    assert not Names().may_have("timing_s/step")


def test_a_step_without_the_metric_is_told_once_and_goes_on(saves, caplog):
    """A step without signal has no metrics of the policy, which is no reason to end a run."""
    decides, _ = saves(keep_best={"metric": "actor/entropy"})
    assert not decides.due(1, {"actor/entropie": 1.0, "loss": 1.0})
    assert not decides.due(2, {"loss": 1.0})
    [record] = caplog.records
    assert "keep_best.metric=actor/entropy: this step has no such metric" in record.getMessage()
    assert "nearest actor/entropie" in record.getMessage()
    assert decides.due(3, {"actor/entropy": 2.0})
    decides, _ = saves(keep_best={"metric": "val-core/y"})
    assert not decides.due(1, {"loss": 1.0})  # no evaluation
    assert len(caplog.records) == 1
    assert not decides.due(2, {"val-core/x": 1.0})
    assert "nearest val-core/x" in caplog.records[1].getMessage()


@pytest.mark.parametrize("before", ["10:00", "1:60:00", "x", 0, "00:00:00", -5])
def test_a_time_that_cannot_be(before):
    with pytest.raises(ValueError, match="before"):
        Checkpoint(before=before)


def train(run_dir, *overrides):
    """The tiny recipe with a save of every best; what is left, and the record in the newest checkpoint."""
    common = [f"run_dir={run_dir}", "checkpoint.every=1", "checkpoint.keep_last=1", "evaluation.enabled=false",
              "mesh.fsdp=1", "mesh.allow_unused_devices=true"]  # fmt: skip
    run(recipes.load("configs/tiny/grpo.yaml", [*common, *overrides]))
    folder = run_dir / "checkpoints"
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    with contextlib.closing(Checkpointer(folder, keep_last=1)) as checkpoints:
        return steps, checkpoints.restore_host(steps[-1])["best"]


@pytest.mark.slow
def test_a_run_keeps_its_best_step_over_a_restart_and_ends_before_its_time(tmp_path):
    """The best by a metric that only falls is step 1, whatever follows."""
    best = "checkpoint.keep_best={metric: training/global_step, mode: min}"
    steps, record = train(tmp_path, best, "steps=9", "checkpoint.before=1")  # the first step takes longer
    assert (steps, record["step"]) == ([1], 1)
    steps, record = train(tmp_path, best, "steps=3")
    assert (steps, record["step"], record["value"]) == ([1, 3], 1, 1.0)
    steps, record = train(tmp_path, best.replace("min", "max"), "steps=4")  # another record
    assert (steps, record["step"]) == ([4], 4)
    with pytest.raises(ValueError, match=r"comes from evaluations and the run makes none"):
        train(tmp_path, "checkpoint.keep_best={metric: val-core/x}", "steps=5")
