"""What a run writes and shows: metrics, rollouts, progress, curves, compile counts."""

import io
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from jaxrl_post.observe.compiles import EVENT, CompileCounter
from jaxrl_post.observe.metrics import MetricsWriter, read_metrics, rollout_file
from jaxrl_post.observe.plot import OFFLINE, ONLINE, _draw, plot_curves, series, trailing_mean
from jaxrl_post.observe.progress import NOTHING_LEARNED, Phases, Progress, clock, step_line
from jaxrl_post.observe.sizes import size_text


def strict(line: str) -> dict:
    """A line as JSON proper: NaN and Infinity, which Python would read, are refused."""
    return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# --- metrics.jsonl


def test_a_step_is_one_json_object_with_step_first(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(0, {"val-core/arithmetic/acc/mean@1": 0.5})
        writer.write(
            1, {"critic/rewards/mean": np.float32(0.25), "training/global_step": np.int32(1), "x": jnp.ones(())}
        )
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [strict(line) for line in lines] == [
        {"step": 0, "val-core/arithmetic/acc/mean@1": 0.5},
        {"step": 1, "critic/rewards/mean": 0.25, "training/global_step": 1, "x": 1.0},
    ]
    assert lines[1].startswith('{"step": 1, ')


def test_each_step_is_on_disk_when_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]


def test_values_that_are_not_finite_are_null_and_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"actor/grad_norm": math.nan, "a": np.float32(-np.inf), "b": 2.0})
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "actor/grad_norm": None,
        "a": None,
        "b": 2.0,
        "nonfinite": {"actor/grad_norm": "nan", "a": "-inf"},
    }


def test_steps_only_grow(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {})
        with pytest.raises(ValueError, match="step 2 come after those of step 2"):
            writer.write(2, {})
    with MetricsWriter(tmp_path, resume_step=2) as writer, pytest.raises(ValueError, match="step 1"):
        writer.write(1, {})


def test_a_resumed_run_leaves_the_files_of_one_that_never_stopped(tmp_path):
    def steps(run_dir, first, last, resume_step=None):
        with MetricsWriter(run_dir, resume_step) as writer:
            for step in range(first, last + 1):
                writer.write(step, {"reward": step / 8})
                writer.write_rollouts(step, [{"text": f"of step {step}"}])

    steps(tmp_path / "whole", 1, 6)
    steps(tmp_path / "stopped", 1, 5)
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    steps(tmp_path / "stopped", 4, 6, resume_step=3)

    whole = {path.relative_to(tmp_path / "whole"): path.read_bytes() for path in (tmp_path / "whole").rglob("*.jsonl")}
    other = tmp_path / "stopped"
    assert whole == {path.relative_to(other): path.read_bytes() for path in other.rglob("*.jsonl")}
    assert len(whole) == 7


def test_resuming_drops_the_rollouts_of_later_steps(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (2, 3, 10):
            writer.write_rollouts(step, [])
    MetricsWriter(tmp_path, resume_step=3).close()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_000002.jsonl", "step_000003.jsonl"]


def test_a_new_run_in_a_used_folder_keeps_the_earlier_files_apart(tmp_path):
    for value in (1, 2, 3):
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, {"run": value})
            writer.write_rollouts(1, [{"run": value}])
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "run": 3}]
    for value in (1, 2):
        previous = tmp_path / f"previous_{value}"
        assert read_metrics(previous / "metrics.jsonl") == [{"step": 1, "run": value}]
        assert rollout_file(previous, 1).read_text() == f'{{"run": {value}}}\n'


def test_rollouts_are_strict_json_one_sample_a_line(tmp_path):
    rows = [
        {"completion": "é\u2028\n", "reward": np.float32(0.5), "ids": np.array([3, 4], np.int32), "ok": True},
        {"reward": math.nan, "row": {"answer": None, "parts": (1, math.inf)}},
    ]
    with MetricsWriter(tmp_path) as writer:
        path = writer.write_rollouts(1, rows)
    assert path == tmp_path / "rollouts" / "step_000001.jsonl"
    assert [strict(line) for line in path.read_text().rstrip("\n").split("\n")] == [
        {"completion": "é\u2028\n", "reward": 0.5, "ids": [3, 4], "ok": True},
        {"reward": "nan", "row": {"answer": None, "parts": [1, "inf"]}},
    ]


# --- phases and progress


def test_phases_add_up_within_a_step_and_start_afresh(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    phases = Phases()

    def spend(name, seconds):
        with phases(name):
            now[0] += seconds

    spend("gen", 2.0)
    spend("update_actor", 3.0)
    spend("gen", 0.5)
    now[0] += 0.25
    assert phases.collect() == {"timing_s/gen": 2.5, "timing_s/update_actor": 3.0, "timing_s/step": 5.75}
    spend("reward", 1.0)
    assert phases.collect() == {"timing_s/reward": 1.0, "timing_s/step": 1.0}


def test_a_phase_that_fails_is_still_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    phases = Phases()

    def fail():
        with phases("gen"):
            now[0] += 4.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert phases.collect()["timing_s/gen"] == 4.0


METRICS = {
    "critic/rewards/mean": 0.3125,
    "response_length/mean": 4.06,
    "actor/entropy": 1.2345,
    "actor/grad_norm": 0.951,
    "perf/throughput": 812.4,
    "timing_s/gen": 2.9,
    "timing_s/reward": 0.001,
    "timing_s/update_actor": 3.0,
    "timing_s/step": 6.1,
    "compile/count": 2,
}


def test_a_step_as_one_line():
    assert step_line(3, 40, METRICS, 222.0) == (
        "step  3/40  reward 0.312  length 4.1  entropy 1.234  grad norm 0.951  tokens/s 812  step s 6.10  "
        "gen 2.90 s, update_actor 3.00 s, 2 compiles  3m42s left"
    )
    assert step_line(1, 2, {"critic/rewards/mean": math.nan}, 0) == "step 1/2  reward nan  0s left"


def test_a_step_that_taught_nothing_says_so():
    alike = step_line(1, 2, {"critic/rewards/mean": 1.0, "training/trained_sequences": 0}, 0)
    assert alike.startswith("step 1/2  reward 1.000  0s left  no update: ")
    assert step_line(1, 2, {"critic/rewards/mean": 1.0, "training/trained_sequences": 6}, 0).endswith("0s left")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (222, "3m42s"), (3780, "1h03m")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_where_there_is_no_terminal_each_step_is_one_line():
    out = io.StringIO()
    with Progress(3, Console(file=out, width=40)) as progress:
        progress.note("held-out [acc] = 0.5")
        for step in (1, 2, 3):
            progress.update(step, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[0] == "held-out [acc] = 0.5"
    assert [line[:10] for line in lines[1:]] == ["step 1/3  ", "step 2/3  ", "step 3/3  "]
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_the_last_steps_and_what_is_left():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, height=40, _environ={})
    with Progress(9, console, rows=2) as progress:
        for step in (1, 2, 3):
            progress.update(step, METRICS | {"critic/rewards/mean": step / 10})
    last = out.getvalue().rsplit("phases", 1)[1]
    assert "0.200" in last
    assert "0.300" in last
    assert "0.100" not in last
    assert "3/9" in last
    assert "37s left" in last  # 6 steps of 6.1 s
    assert "gen 2.90 s, update_actor 3.00 s, 2 compiles" in last


def test_a_terminal_says_why_a_step_made_no_update():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=240, height=40, _environ={})
    with Progress(2, console) as progress:
        progress.update(1, METRICS | {"training/trained_sequences": 0})
    assert NOTHING_LEARNED in out.getvalue()


def test_the_time_left_forgets_the_step_that_compiled():
    progress = Progress(10, Console(file=io.StringIO()))
    for step, seconds in enumerate([60.0, 2.0, 2.0, 2.0], start=1):
        progress.update(step, {"timing_s/step": seconds})
    assert progress.eta(4) == 12.0


# --- curves


def test_trailing_mean_leaves_out_what_is_not_finite():
    np.testing.assert_array_equal(trailing_mean(np.array([1.0, 2.0, 6.0, 4.0])), [1.0, 1.5, 3.0, 4.0])
    np.testing.assert_array_equal(trailing_mean(np.array([np.nan, 2.0, np.nan, 4.0])), [np.nan, 2.0, 2.0, 3.0])


def test_a_series_holds_the_steps_that_have_the_metric():
    steps, values = series([{"step": 0, "v": 1.0}, {"step": 1}, {"step": 4, "v": None}], "v")
    np.testing.assert_array_equal(steps, [0, 4])
    np.testing.assert_array_equal(values, [1.0, np.nan])


def written_run(run_dir, rewards):
    with MetricsWriter(run_dir) as writer:
        writer.write(0, {"val-core/arithmetic/acc/mean@1": 0.25})
        for step, reward in enumerate(rewards, start=1):
            writer.write(step, METRICS | {"critic/rewards/mean": reward})
    return run_dir / "metrics.jsonl"


def test_curves_show_the_reward(tmp_path):
    plot_curves(written_run(tmp_path / "rising", [0.1, 0.5, math.nan, 0.9]), tmp_path / "rising.png", ONLINE)
    plot_curves(written_run(tmp_path / "falling", [0.9, 0.5, 0.3, 0.1]), tmp_path / "falling.png", ONLINE)
    rising, falling = imread(tmp_path / "rising.png"), imread(tmp_path / "falling.png")
    assert rising.shape == falling.shape == (840, 1500, 4)
    assert not np.array_equal(rising, falling)
    # The curve's blue: towards the right it is higher up (a smaller row) where the reward rose.
    blue = [
        np.argwhere(np.abs(image[:540, :, :3] - [9 / 255, 105 / 255, 218 / 255]).max(-1) < 0.02)
        for image in (rising, falling)
    ]
    slopes = [np.polyfit(pixels[:, 1], pixels[:, 0], 1)[0] for pixels in blue]
    assert slopes[0] < 0 < slopes[1]


def test_a_run_of_one_step_and_no_evaluation_can_be_drawn(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"critic/rewards/mean": 0.5})
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curve.png", ONLINE)
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_offline_runs_show_loss_and_accuracy_side_by_side():
    records = [{"step": 0, "val-core/loss": 0.7, "val-core/accuracy": 0.1}]
    records += [{"step": step, "loss": 0.7 - 0.1 * step, "accuracy": 0.3 * step} for step in (1, 2)]
    records += [
        {"step": 3, "loss": 0.2, "accuracy": 0.9, "val-core/loss": 0.3, "val-core/accuracy": 0.8, "margin": 2.0}
    ]
    loss, accuracy, margin = _draw(records, OFFLINE).axes
    assert [axes.get_title(loc="left") for axes in (loss, accuracy, margin)] == ["loss", "accuracy", "score margin"]
    np.testing.assert_allclose(loss.lines[0].get_xydata(), [[1, 0.6], [2, 0.5], [3, 0.2]])
    np.testing.assert_allclose(loss.lines[-1].get_xydata(), [[0, 0.7], [3, 0.3]])
    np.testing.assert_allclose(accuracy.lines[-1].get_xydata(), [[0, 0.1], [3, 0.8]])
    np.testing.assert_allclose(margin.lines[0].get_xydata(), [[3, 2.0]])
    assert loss.get_position().x1 < accuracy.get_position().x0


def test_curves_need_a_file_with_rewards(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics at"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curve.png", ONLINE)
    MetricsWriter(tmp_path).close()
    with pytest.raises(ValueError, match="no step with critic/rewards/mean"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curve.png", ONLINE)


# --- sizes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (102, "102 B"),
        (103, "0.10 KiB"),
        (1536, "1.50 KiB"),
        (41.5 * 2**20, "41.50 MiB"),
        (0.9 * 2**30, "0.90 GiB"),
        (3 * 2**40, "3072.00 GiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_of_which_there_is_a_tenth(size, text):
    assert size_text(size) == text


# --- compiles


def test_each_new_shape_is_one_compile_and_a_known_one_is_none():
    double = jax.jit(lambda x: x * 2 + 1)
    inputs = [np.zeros(n, np.float32) for n in (3, 3, 5)]
    with CompileCounter() as compiles:
        counts = [(jax.block_until_ready(double(x)), compiles.collect()["compile/count"])[1] for x in inputs]
        double(np.zeros(7, np.float32))
        assert compiles.collect()["compile/seconds"] > 0
    assert counts == [1, 0, 1]
    double(np.zeros(9, np.float32))
    assert compiles.collect() == {"compile/count": 0, "compile/seconds": 0.0}


def test_other_events_are_not_compiles():
    with CompileCounter() as compiles:
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.0)
        jax.monitoring.record_event_duration_secs(EVENT, 0.5)
    assert compiles.collect() == {"compile/count": 1, "compile/seconds": 0.5}
