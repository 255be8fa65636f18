"""What teachers read: the student's packed rows, with other prompts where a teacher sees another one.

Legend: A micro-batches, B rows, T token positions and M targets of a row. Host-side numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxrl_post.training.offline_packing import ExampleShape, layout
from jaxrl_post.training.packing import PackShape
from jaxrl_post.training.update import batch_shardings
from jaxrl_post.types import Lesson, TaughtBatch, TeacherView, TrainBatch
from jaxrl_post.types_offline import Example


def teacher_view(rows: TrainBatch, lessons: Sequence[Lesson]) -> TeacherView:
    """`rows.advantage` holds, at each live target, 1 + the index of its lesson; rows have room for every lesson's
    prompt (`pack` with `lessons`).

    Where no lesson has a prompt of its own the arrays are those of `rows`.
    """
    live_ABM = rows.mask
    index_ABM = rows.advantage.astype(np.int64) - 1
    teacher_ABM = np.zeros(live_ABM.shape, np.int32)
    teacher_ABM[live_ABM] = np.array([lesson.teacher for lesson in lessons], np.int32)[index_ABM[live_ABM]]
    if all(lesson.prompt_ids is None for lesson in lessons):
        return TeacherView(rows.tokens, rows.positions, rows.segments, rows.branches, rows.source, teacher_ABM)
    fields = (rows.tokens, rows.positions, rows.segments, rows.branches, rows.source, teacher_ABM)
    view = TeacherView(*map(np.zeros_like, fields))._replace(teacher=teacher_ABM)
    for a, b in np.argwhere(live_ABM.any(axis=2)):
        row = TrainBatch(*(field[a, b] for field in rows))
        prompts = {
            int(row.segments[source]): lessons[i].prompt_ids
            for source, i in zip(row.source[row.mask], index_ABM[a, b][row.mask], strict=True)
        }
        _write_row(TeacherView(*(field[a, b] for field in view)), row, prompts)
    return view


def example_view(rows: TrainBatch, examples: Sequence[Example], shape: ExampleShape) -> TeacherView:
    """The view of rows that `pack_examples` made of these examples."""
    number_ABM = np.zeros(rows.mask.shape, np.float32)
    for (a, b), row in layout(examples, shape):
        counts = [examples[i].targets for i in row]
        number_ABM[a, b, : sum(counts)] = np.repeat(np.array(row) + 1, counts)
    return teacher_view(rows._replace(advantage=number_ABM), [example.lesson for example in examples])


def taught_shardings(shape: PackShape, mesh: Mesh) -> TaughtBatch:
    """Views are cut like rows. Raises: ValueError as `batch_shardings`."""
    rows = batch_shardings(shape, mesh)
    return TaughtBatch(rows, view_shardings(rows))


def view_shardings(rows: TrainBatch) -> TeacherView:
    """As the fields of rows with these shardings."""
    return TeacherView(rows.tokens, rows.positions, rows.segments, rows.branches, rows.source, rows.source)


def _write_row(view: TeacherView, row: TrainBatch, prompts: dict[int, tuple[int, ...] | None]) -> None:
    """Fills the view of one row in place: each segment's trunk is the teacher's prompt, its branches follow."""
    moved_T = np.zeros(len(row.tokens), np.int32)  # where a student's column went
    start = 0
    for segment, prompt in sorted(prompts.items()):
        columns = np.flatnonzero(row.segments == segment)
        trunk, rest = columns[row.branches[columns] == 0], columns[row.branches[columns] > 0]
        ids = row.tokens[trunk] if prompt is None else np.array(prompt, np.int32)
        end = start + len(ids)
        stop = end + len(rest)
        view.tokens[start:stop] = np.concatenate([ids, row.tokens[rest]])
        view.positions[start:stop] = np.concatenate([np.arange(len(ids)), row.positions[rest] + len(ids) - len(trunk)])
        view.segments[start:stop] = segment
        view.branches[end:stop] = row.branches[rest]
        moved_T[trunk[-1]] = end - 1
        moved_T[rest] = np.arange(end, stop)
        start = stop
    view.source[row.mask] = moved_T[row.source[row.mask]]
