"""What a folder of weights may hold, and how much of it is read."""

import dataclasses
import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import BASE, CASES, assert_same_bits, draw, shardings_on

from jaxrl_post.models import huggingface
from jaxrl_post.models.config import from_huggingface, to_huggingface
from jaxrl_post.models.decoder import abstract
from jaxrl_post.models.huggingface import load_params, read_config
from jaxrl_post.models.huggingface_export import save_params
from sharding.mesh import make_mesh
from sharding.placement import tree_shardings
from sharding.rules import ROLLOUT, Rules

TIED = CASES["qwen2"]
INDEX = "model.safetensors.index.json"


def saved(folder, config, **options):
    params = draw(config)
    save_params(folder, params, config, **options)
    return params


def load(folder, config):
    return load_params(folder, config, shardings_on(config))


def change(folder, **tensors):
    """Rewrite the folder's only weight file: dotted names with `__`, None removes one."""
    content = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        content.pop(name.replace("__", "."), None)
        if value is not None:
            content[name.replace("__", ".")] = value
    save_file(content, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_a_cut_mesh_gets_the_bits_one_device_gets(case, tmp_path):
    config = CASES[case]
    params = saved(tmp_path / "m", config, max_shard_bytes=30_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    one = load(tmp_path / "m", config)
    shardings = shardings_on(config, fsdp=4, tensor=2)
    many = load_params(tmp_path / "m", config, shardings)
    assert_same_bits(one, params)
    assert_same_bits(many, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, many) == shardings
    assert not many["layers"]["q"].sharding.is_fully_replicated


def test_an_axis_may_cut_head_width_or_layers(tmp_path):
    params = saved(tmp_path / "m", BASE)
    _, shapes, axes = abstract(BASE)
    rules = Rules(head_dim=("tensor",), layers=("fsdp",), vocab=("data",))
    shardings = tree_shardings(axes, shapes, rules, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert_same_bits(load_params(tmp_path / "m", BASE, shardings), params)


class Counting:
    """A tensor of a file that notes how many bytes each read asks for."""

    def __init__(self, source, reads):
        self.source, self.reads = source, reads
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index):
        part = self.source[index]
        self.reads.append(part.nbytes)
        return part


@pytest.mark.parametrize(("sizes", "rules"), [({"fsdp": 4, "tensor": 2}, None), ({"data": 4, "tensor": 2}, ROLLOUT)])
def test_loading_reads_each_byte_once_and_only_in_slices(tmp_path, monkeypatch, sizes, rules):
    saved(tmp_path / "m", BASE)
    reads: list[int] = []
    plain = huggingface.open_tensors
    counted = lambda folder: {name: Counting(tensor, reads) for name, tensor in plain(folder).items()}
    monkeypatch.setattr(huggingface, "open_tensors", counted)
    _, shapes, axes = abstract(BASE)
    shardings = shardings_on(BASE, **sizes)
    if rules is not None:
        shardings = tree_shardings(axes, shapes, rules, make_mesh(sizes))
    load_params(tmp_path / "m", BASE, shardings)
    assert sum(reads) == sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))
    largest = max(leaf.size * 4 for leaf in jax.tree.leaves(shapes))  # the embedding
    assert max(reads) == largest // (8 if rules is None else 2)


def test_weights_are_cast_to_the_master_dtype(tmp_path):
    params = saved(tmp_path / "m", BASE, dtype="bfloat16")
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same_bits(load(tmp_path / "m", BASE), widened)
    saved(tmp_path / "wide", BASE)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_same_bits(load(tmp_path / "wide", dataclasses.replace(BASE, param_dtype="bfloat16")), narrow)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path):
    saved(tmp_path / "m", TIED)
    change(
        tmp_path / "m",
        model__layers__1__self_attn__k_proj__bias=None,
        model__layers__0__self_attn__o_proj__bias=np.zeros(32, np.float32),
        model__norm__weight=np.ones(31, np.float32),
        model__layers__0__mlp__up_proj__weight=np.ones((48, 32), np.int8),
    )
    with pytest.raises(ValueError, match=r"do not fit config\.json") as caught:
        load(tmp_path / "m", TIED)
    for part in (
        "model.layers.1.self_attn.k_proj.bias is missing",
        "model.layers.0.self_attn.o_proj.bias is unexpected",
        "model.norm.weight has shape [31], expected [32]",
        "model.layers.0.mlp.up_proj.weight has dtype I8",
    ):
        assert part in str(caught.value)


def test_long_lists_of_problems_are_cut(tmp_path):
    saved(tmp_path / "m", BASE)
    with pytest.raises(ValueError, match=r"and \d+ more"):
        load(tmp_path / "m", dataclasses.replace(BASE, layers=4))


def test_rotary_buffers_are_ignored(tmp_path):
    params = saved(tmp_path / "m", BASE)
    change(tmp_path / "m", model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    assert_same_bits(load(tmp_path / "m", BASE), params)


def test_an_untied_model_without_a_head_is_an_error(tmp_path):
    saved(tmp_path / "m", BASE)
    change(tmp_path / "m", lm_head__weight=None)
    with pytest.raises(ValueError, match=r"lm_head.weight is missing.*tie_word_embeddings=false"):
        load(tmp_path / "m", BASE)


def test_a_tied_model_may_repeat_its_embedding_as_head_but_not_contradict_it(tmp_path):
    params = saved(tmp_path / "m", TIED)
    embed = np.array(params["embed"])
    change(tmp_path / "m", lm_head__weight=embed)
    assert_same_bits(load(tmp_path / "m", TIED), params)
    embed[95, 31] += 1
    change(tmp_path / "m", lm_head__weight=embed)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, yet lm_head.weight differs"):
        load(tmp_path / "m", TIED)


def test_untied_head_and_embedding_are_both_written_and_differ(tmp_path):
    saved(tmp_path / "m", BASE)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert (tensors["lm_head.weight"] != tensors["model.embed_tokens.weight"]).any()


class Marker:
    """Writes a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_refused_unread(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(tmp_path / "ran")))
    np.savez(tmp_path / "weights.npz", np.asarray([Marker(tmp_path / "ran")], object))
    with pytest.raises(ValueError, match=r"pytorch_model.bin, weights.npz.*refused.*safetensors"):
        load(tmp_path, BASE)
    assert not (tmp_path / "ran").exists()


def listed_as(folder, file):
    """A saved folder whose index lists its weights under `file`; they are kept in x.safetensors above the folder."""
    params = saved(folder, BASE)
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    return params


def test_a_shard_in_a_subfolder_is_read(tmp_path):
    params = listed_as(tmp_path / "m", "sub/x.safetensors")
    (tmp_path / "m" / "sub").mkdir()
    (tmp_path / "x.safetensors").rename(tmp_path / "m" / "sub" / "x.safetensors")
    assert_same_bits(load(tmp_path / "m", BASE), params)


OUTSIDE = {
    "parent": "../x.safetensors",
    "parent of a subfolder": "sub/../../x.safetensors",
    "absolute": "{above}/x.safetensors",
    "absolute, inside": "{above}/m/inside.safetensors",
    "link": "x.safetensors",
    "link to a folder": "out/x.safetensors",
}


@pytest.mark.parametrize("way", OUTSIDE)
def test_shards_outside_the_folder_are_never_opened(tmp_path, monkeypatch, way):
    file = OUTSIDE[way].format(above=tmp_path)
    listed_as(tmp_path / "m", file)
    (tmp_path / "m" / "sub").mkdir()
    (tmp_path / "m" / "out").symlink_to(tmp_path)
    (tmp_path / "m" / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    (tmp_path / "m" / "inside.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes())
    assert (tmp_path / "m" / file).is_file()
    opened = []
    monkeypatch.setattr("jaxrl_post.models.shards.safe_open", lambda *a, **k: opened.append(a))
    with pytest.raises(ValueError, match=r"\.safetensors' is no plain path inside the folder"):
        load(tmp_path / "m", BASE)
    assert not opened


def test_the_hub_cache_layout_is_read_and_no_other_link_beside_it(tmp_path):
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    params = saved(repo / "snapshots" / "abc", BASE)
    weights = repo / "snapshots" / "abc" / "model.safetensors"
    weights.rename(repo / "blobs" / "0123")
    weights.symlink_to("../../blobs/0123")
    assert_same_bits(load(weights.parent, BASE), params)
    weights.unlink()
    (repo / "blobs" / "0123").rename(repo / "0123")
    weights.symlink_to("../../0123")
    with pytest.raises(ValueError, match="is no plain path inside the folder"):
        load(weights.parent, BASE)


@pytest.mark.parametrize("left", [4, 100, -5])
def test_a_truncated_file_is_named(tmp_path, left):
    saved(tmp_path / "m", BASE)
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file.*truncated"):
        load(tmp_path / "m", BASE)


def test_an_index_that_disagrees_with_its_shards_is_an_error(tmp_path):
    saved(tmp_path / "m", BASE, max_shard_bytes=30_000)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    gone = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.extra"] = gone
    (tmp_path / "m" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model.extra is not in model-.*model.norm.weight in model-.* is not listed"):
        load(tmp_path / "m", BASE)
    (tmp_path / "m" / gone).unlink()
    with pytest.raises(ValueError, match=rf"{gone} does not exist"):
        load(tmp_path / "m", BASE)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is not an index"):
        load(tmp_path, BASE)


def test_an_index_may_list_safetensors_only(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(ValueError, match=r"'pytorch_model.bin': only .safetensors"):
        load(tmp_path, BASE)


def test_export_never_touches_a_folder_in_use_and_leaves_nothing_after_a_failure(tmp_path, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("mine")
    with pytest.raises(ValueError, match="used already exists and is not an empty folder"):
        saved(tmp_path / "used", BASE)
    with pytest.raises(ValueError, match="dtype='float16': expected float32 or bfloat16"):
        saved(tmp_path / "m", BASE, dtype="float16")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr("jaxrl_post.models.huggingface_export.write_tensors", full)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path / "m", BASE)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert (tmp_path / "used" / "note").read_text() == "mine"


def test_export_refuses_parameters_of_another_decoder(tmp_path):
    with pytest.raises(ValueError, match=r"do not fit the config.*q_proj.bias"):
        save_params(tmp_path / "m", draw(TIED), dataclasses.replace(TIED, family="llama"))


def test_config_errors_name_path_key_and_value(tmp_path):
    with pytest.raises(ValueError, match="absent is not a folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        read_config(tmp_path)
    for text, message in {"{": "is not JSON", "[]": "holds a list", "{}": f"{tmp_path}: architecture None"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)


RAW = to_huggingface(BASE)
UNSUPPORTED = [
    ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM' is not supported.*LlamaForCausalLM"),
    ({"architectures": None}, "architecture None"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding_attention"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'.*default, llama3"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": "llama3"}, "rope_scaling='llama3': expected objects"),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
    ({"vocab_size": -1}, "vocab_size=-1"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_what_would_change_the_numbers_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(RAW | change)


def test_defaults_that_differ_by_family():
    bare = {key: value for key, value in RAW.items() if key not in ("head_dim", "num_key_value_heads", "rope_theta")}
    config = from_huggingface(bare)
    assert (config.head_dim, config.kv_heads, config.rope_theta) == (8, 4, 10_000.0)
    with pytest.raises(ValueError, match="lacks 'head_dim'"):
        from_huggingface(bare | {"architectures": ["Qwen3ForCausalLM"]})
