"""The teachers of a run: shapes and layouts first, every refusal among them, then weights that nothing updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxrl_post.config_teachers import ModelTeacher, SelfTeacher, StartTeacher, Taught
from jaxrl_post.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_post.loops.decoder_shape import compute_dtype, random_config
from jaxrl_post.loops.network import Network, check_row, decoder_params
from jaxrl_post.models import backends, sequence
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.decoder import Params, abstract
from jaxrl_post.models.huggingface import open_checked, read_config
from jaxrl_post.models.zoo import resolve
from sharding.mesh import platform

Tree = Any


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A decoder on the student's mesh, in the training layout and its compute dtype; no weights.

    One that `is_student` has no weights of its own: it is the policy as it is.
    """

    name: str
    network: Network
    seed: int
    is_student: bool

    def check_positions(self, tokens: int) -> None:
        """Raises: ValueError when the teacher cannot see so many."""
        limit = self.network.model.max_positions
        if tokens > limit:
            raise ValueError(
                f"teacher {self.name!r} has {limit} positions, and what it sees of a row and answer takes {tokens}: "
                "shorten its demonstrations, the prompts or the answers"
            )

    def params(self) -> Params | tuple[()]:
        """The frozen weights, read from the folder or drawn from the seed; () for the student."""
        if self.is_student:
            return ()
        return decoder_params(self.network.folder, self.network.model, self.seed, self.network.shardings())


class Teachers:
    """A run's teachers and, once loaded, their weights, which nothing changes.

    No checkpoint holds them: a resumed run loads or draws them anew.
    """

    def __init__(self, teachers: tuple[Teacher, ...]):
        """Holds no weights yet."""
        self._teachers = teachers
        self.params: tuple[Params | tuple[()], ...] = ()

    def load(self) -> None:
        self.params = tuple(teacher.params() for teacher in self._teachers)

    @property
    def graphdefs(self) -> tuple[nnx.GraphDef, ...]:
        return tuple(teacher.network.graphdef for teacher in self._teachers)

    @property
    def shardings(self) -> tuple[Tree, ...]:
        """Of `params`."""
        return tuple(() if teacher.is_student else teacher.network.shardings() for teacher in self._teachers)

    def weights(self, number: int, student: Params) -> Params:
        """What teacher `number` computes with; `student` are the policy's weights."""
        return self.params[number] or student

    def check_row(self, length: int) -> None:
        """Raises: ValueError naming the teacher that cannot read packed rows of so many positions."""
        for teacher in self._teachers:
            try:
                check_row(teacher.network, length)
            except ValueError as error:
                raise ValueError(f"teacher {teacher.name!r}: {error}") from error

    def layout(self, number: int) -> Tree:
        """Shardings of `weights`."""
        return self._teachers[number].network.shardings()


NO_TEACHERS = Teachers(())


def build_teachers(taught: Taught | None, student: Network, seed: int, tokenizer: Tokenizer) -> tuple[Teacher, ...]:
    """The teachers that a recipe asks for; `seed` is that of the run, for a student that starts at random.

    Raises: ValueError naming the teacher: weights that cannot be read, sizes that the mesh does not divide, heads that
    `training.sequence_attention` exchanges among them, or that the student's attention backend has no kernel for,
    another vocabulary.
    """
    built = []
    for name, options in (taught.by_tag if taught else {}).items():
        try:
            built.append(_teacher(name, options, student, seed, tokenizer))
        except ValueError as error:
            raise ValueError(f"teacher {name!r}: {error}") from error
    return tuple(built)


def _teacher(
    name: str, options: ModelTeacher | StartTeacher | SelfTeacher, student: Network, seed: int, tokenizer: Tokenizer
) -> Teacher:
    match options:
        case SelfTeacher():
            return Teacher(name, student, seed, is_student=True)
        case StartTeacher():
            model = dataclasses.replace(student.model, param_dtype=student.model.dtype)
            return Teacher(name, _network(student.folder, model, student.mesh), seed, is_student=False)
        case ModelTeacher():
            folder = None if options.path is None else resolve(options.path, "path")
            model = _model(options, folder, student)
            _check_vocabulary(folder, model, student.model, tokenizer)
            return Teacher(name, _network(folder, model, student.mesh), options.seed, is_student=False)


def _model(options: ModelTeacher, folder: Path | None, student: Network) -> ModelConfig:
    dtype = compute_dtype(options.dtype, platform(student.mesh))
    if folder is not None:
        shape = read_config(folder)
    else:
        assert options.random is not None
        shape = random_config(options.random, student.model.vocab_size)
    sizes = student.mesh.shape  # both read the same rows, cut alike
    kind = sequence.choose(
        student.model.sequence_attention, shape.heads, shape.kv_heads, sizes["sequence"], sizes["tensor"]
    )
    model = dataclasses.replace(
        shape, dtype=dtype, param_dtype=dtype, platform=student.model.platform, sequence_attention=kind
    )
    ring = sizes["sequence"] > 1 and kind == "ring"
    backend = backends.choose(student.model.attention, model, model.platform, ring)
    return dataclasses.replace(model, attention=backend)


def _network(folder: Path | None, model: ModelConfig, mesh: Mesh) -> Network:
    """Raises: ValueError for sizes that the mesh does not divide, or as `open_checked`."""
    network = Network(folder, model, *abstract(model), mesh, has_head=False)
    network.shardings()
    if folder is not None:
        open_checked(folder, model)
    return network


def _check_vocabulary(folder: Path | None, model: ModelConfig, student: ModelConfig, tokenizer: Tokenizer) -> None:
    if model.vocab_size != student.vocab_size:
        raise ValueError(
            f"{folder} has a vocabulary of {model.vocab_size}, the student's has {student.vocab_size}: a token's "
            "probabilities cannot be compared. Take a teacher of the student's vocabulary"
        )
    if folder is None:
        return
    theirs, ours = load_tokenizer(folder).vocabulary(), tokenizer.vocabulary()
    if theirs == ours:
        return
    token = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
    raise ValueError(
        f"{folder} has another tokenizer than the student: token {token!r} is id {theirs.get(token)} there and "
        f"{ours.get(token)} here. Take a teacher of the student's tokenizer"
    )
