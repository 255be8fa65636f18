"""Rotary phases against float64, and Llama 3.1's frequency bands."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from tiny_models import BASE

from jaxrl_post.models.config import Llama3Rope
from jaxrl_post.models.rope import inverse_frequencies, phases, rotate

WIDE = dataclasses.replace(BASE, head_dim=128, dtype="bfloat16", max_positions=8192)


def test_phases_are_exact_at_far_positions_in_a_bfloat16_model():
    positions = np.asarray([1, 257, 1000, 4095])
    cos, sin = phases(WIDE, jnp.asarray(positions)[None])
    angle = positions[:, None] * 10_000.0 ** -(np.arange(64) / 64)
    np.testing.assert_allclose(cos[0, :, 0], np.cos(angle), rtol=0, atol=2e-4)
    np.testing.assert_allclose(sin[0, :, 0], np.sin(angle), rtol=0, atol=2e-4)
    # A frequency rounded to bfloat16 would give +0.4238 here.
    np.testing.assert_allclose(cos[0, 3, 0, 1], -0.742366, rtol=0, atol=2e-4)


def test_rotation_of_bfloat16_heads_rounds_once():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 128)), jnp.bfloat16)
    cos, sin = phases(WIDE, jnp.asarray([[4095]]))
    angle = 4095 * 10_000.0 ** -(np.arange(64) / 64)
    a, b = np.split(np.asarray(x, np.float64)[0, 0, 0], 2)
    exact = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])
    rotated = rotate(x, cos, sin)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rotated, np.float64)[0, 0, 0], exact, rtol=2**-8, atol=1e-3)


def test_llama3_scaling_keeps_short_divides_long_and_blends_between():
    plain = dataclasses.replace(WIDE, rope_theta=500_000.0)
    scaling = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    ratio = inverse_frequencies(dataclasses.replace(plain, rope_scaling=scaling)) / inverse_frequencies(plain)
    np.testing.assert_array_equal(ratio[:29], np.ones(29))
    band = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], band, rtol=0, atol=2e-6)
    np.testing.assert_allclose(ratio[35:], np.full(29, 0.125), rtol=1e-6)
    last = inverse_frequencies(dataclasses.replace(plain, rope_scaling=scaling))[-1]
    np.testing.assert_allclose(last, 3.0689259889e-7, rtol=1e-6)
