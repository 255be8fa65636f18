"""The soft length penalty by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.objectives.overlong import soft_penalty


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_reference_configuration(transform):
    lengths = jnp.array([0, 16384, 17408, 18432, 20480, 25000])
    got = transform(lambda n: soft_penalty(n, max_length=20480, buffer=4096, factor=2.0))(lengths)
    np.testing.assert_array_equal(got, [0, 0, -0.5, -1.0, -2.0, -2.0])


@pytest.mark.parametrize("buffer", [0, 9])
def test_a_buffer_outside_the_limit_is_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer={buffer}.*max_length=8"):
        soft_penalty(jnp.array([1]), max_length=8, buffer=buffer)
