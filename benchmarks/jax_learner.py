"""The same update as a JAX user would write it, in the style of Acme's MPO learner.

The whole update (Steps 1 to 3, three Adam steps and the periodic copy of the target networks) is one
function under ``jax.jit`` that takes the state and donates it. Networks and losses are those of this
package: by default a first layer with layer normalisation and tanh, then ELU, or residual blocks; the
decoupled fit of a diagonal Gaussian; multipliers and temperature learned by Adam through softplus.

It is a peer in ``benchmarks/update.py``, which runs it in a process of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

EPSILON, EPSILON_MU, EPSILON_SIGMA = 0.1, 5e-4, 1e-5
GAMMA, TARGET_PERIOD = 0.99, 250

Params = list[dict[str, jax.Array]]


class State(NamedTuple):
    params: dict[str, Any]
    targets: dict[str, Params]
    optimizers: dict[str, Any]
    key: jax.Array
    updates: jax.Array


def _init_network(key: jax.Array, sizes: tuple[int, ...], network: str) -> Params:
    # A residual network has a layer that widens and one that narrows for each block, and a
    # normalisation before each of its layers but the first.
    first, *hidden, outputs = sizes
    if network == "residual":
        wide = [width for size in hidden for width in (2 * size, size)]
        sizes = (first, hidden[0], *wide, outputs)
    layers = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        key, own = jax.random.split(key)
        bound = 1.0 / np.sqrt(inputs)
        weight = jax.random.uniform(own, (inputs, outputs), minval=-bound, maxval=bound)
        layers.append({"w": weight, "b": jnp.zeros(outputs)})
        normed = inputs if network == "residual" else outputs
        if index % 2 == 1 if network == "residual" else index == 0:
            layers[-1] |= {"scale": jnp.ones(normed), "offset": jnp.zeros(normed)}
    return layers


def _normed(layer: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    centered = inputs - inputs.mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return normed * layer["scale"] + layer["offset"]


def _apply(params: Params, inputs: jax.Array) -> jax.Array:
    if "scale" not in params[0]:
        return _apply_residual(params, inputs)
    for index, layer in enumerate(params):
        inputs = inputs @ layer["w"] + layer["b"]
        if index == 0:
            inputs = jnp.tanh(_normed(layer, inputs))
        elif index < len(params) - 1:
            inputs = jax.nn.elu(inputs)
    return inputs


def _apply_residual(params: Params, inputs: jax.Array) -> jax.Array:
    first, *blocks, last = params
    inputs = inputs @ first["w"] + first["b"]
    for widen, narrow in zip(blocks[::2], blocks[1::2]):
        wide = jax.nn.relu(_normed(widen, inputs) @ widen["w"] + widen["b"])
        inputs = inputs + wide @ narrow["w"] + narrow["b"]
    return _normed(last, inputs) @ last["w"] + last["b"]


def _policy(params: Params, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, stddev = jnp.split(_apply(params, obs), 2, axis=-1)
    return mean, jax.nn.softplus(stddev) + 1e-4


def _q(params: Params, obs: jax.Array, actions: jax.Array) -> jax.Array:
    inputs = jnp.concatenate([obs, jnp.clip(actions, -1.0, 1.0)], axis=-1)
    return _apply(params, inputs).squeeze(-1)


def _log_prob(mean: jax.Array, stddev: jax.Array, actions: jax.Array) -> jax.Array:
    square = jnp.square((actions - mean) / stddev)
    return (-0.5 * square - jnp.log(stddev) - 0.5 * jnp.log(2.0 * jnp.pi)).sum(-1)


def _critic_loss(params: Params, targets: dict, batch: dict, key: jax.Array) -> jax.Array:
    mean, stddev = _policy(targets["policy"], batch["new_obs"])
    actions = mean + stddev * jax.random.normal(key, mean.shape)
    next_q = _q(targets["critic"], batch["new_obs"], actions)
    target = batch["rewards"] + GAMMA * (1.0 - batch["terminateds"]) * next_q
    return jnp.square(_q(params, batch["obs"], batch["actions"]) - target).mean()


def _policy_loss(
    params: dict, targets: dict, batch: dict, key: jax.Array, num_actions: int
) -> jax.Array:
    old_mean, old_stddev = _policy(targets["policy"], batch["obs"])
    actions = old_mean + old_stddev * jax.random.normal(key, (num_actions, *old_mean.shape))
    states = jnp.broadcast_to(batch["obs"], (num_actions, *batch["obs"].shape))
    q = jax.lax.stop_gradient(_q(targets["critic"], states, actions))
    temperature = jax.nn.softplus(params["dual"]["temperature"]) + 1e-8
    weights = jax.lax.stop_gradient(jax.nn.softmax(q / temperature, axis=0))
    log_mean_exp = jax.nn.logsumexp(q / temperature, axis=0) - jnp.log(num_actions)
    dual = temperature * (EPSILON + log_mean_exp.mean())
    mean, stddev = _policy(params["policy"], batch["obs"])
    log_probs = _log_prob(mean, old_stddev, actions) + _log_prob(old_mean, stddev, actions)
    loss = -(weights * log_probs).sum(0).mean()
    kl_mu = (0.5 * jnp.square((mean - old_mean) / old_stddev)).sum(-1).mean()
    ratio = old_stddev / stddev
    kl_sigma = (0.5 * jnp.square(ratio) - 0.5 - jnp.log(ratio)).sum(-1).mean()
    for name, kl, epsilon in (("mu", kl_mu, EPSILON_MU), ("sigma", kl_sigma, EPSILON_SIGMA)):
        alpha = jax.nn.softplus(params["dual"][name]) + 1e-8
        loss += jax.lax.stop_gradient(alpha) * kl
        dual += alpha * (epsilon - jax.lax.stop_gradient(kl))
    return loss + dual


def _optimizers() -> dict[str, optax.GradientTransformation]:
    return {"critic": optax.adam(3e-4), "policy": optax.adam(3e-4), "dual": optax.adam(1e-2)}


@functools.partial(jax.jit, static_argnames="num_actions", donate_argnums=0)
def _update(state: State, batch: dict[str, jax.Array], num_actions: int) -> State:
    key, first, second = jax.random.split(state.key, 3)
    improved = {name: state.params[name] for name in ("policy", "dual")}
    gradients = {
        "critic": jax.grad(_critic_loss)(state.params["critic"], state.targets, batch, first),
        **jax.grad(_policy_loss)(improved, state.targets, batch, second, num_actions),
    }
    params, optimizers = {}, {}
    for name, optimizer in _optimizers().items():
        step, optimizers[name] = optimizer.update(gradients[name], state.optimizers[name])
        params[name] = optax.apply_updates(state.params[name], step)
    online = {name: params[name] for name in state.targets}
    updates = state.updates + 1
    targets = optax.periodic_update(online, state.targets, updates, TARGET_PERIOD)
    return State(params, targets, optimizers, key, updates)


def make_update(
    size: tuple[int, int, int, tuple[int, ...], tuple[int, ...], str], num_actions: int
) -> Callable[[list[dict[str, np.ndarray]]], None]:
    """Return a function that makes one update for each of several batches."""
    observations, actions, _, policy, critic, network = size
    keys = jax.random.split(jax.random.key(0), 3)
    networks = {
        "policy": _init_network(keys[0], (observations, *policy, 2 * actions), network),
        "critic": _init_network(keys[1], (observations + actions, *critic, 1), network),
    }
    params = networks | {"dual": {name: jnp.ones(()) for name in ("temperature", "mu", "sigma")}}
    optimizers = {name: made.init(params[name]) for name, made in _optimizers().items()}
    # The state is donated, so online and target networks must not share memory.
    targets = jax.tree.map(jnp.copy, networks)
    state = State(params, targets, optimizers, keys[2], jnp.zeros((), jnp.int32))

    def update(batches: list[dict[str, np.ndarray]]) -> None:
        nonlocal state
        for batch in batches:
            state = _update(state, batch, num_actions)
        jax.block_until_ready(state)

    return update
